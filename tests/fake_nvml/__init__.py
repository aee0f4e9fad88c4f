"""An imagined node with NVIDIA GPUs: a real libnvidia-ml.so.1 built from C, steered by tests.

    node = FakeNode.create(tmp_path, num_gpus=8)
    subprocess.run(command, env=node.env())        # nvidia-ml-py in that process sees the node
    node.gpu(3).lost = 1                           # and sees this at its next call

`node.load_here()` makes nvidia-ml-py in this very process use the library.
"""

from fake_nvml.node import FakeGpu, FakeNode, SetPrivilege, WriteRecord, build_library

__all__ = ["FakeGpu", "FakeNode", "SetPrivilege", "WriteRecord", "build_library"]
