"""Megatron flags that tests of the training loop share: a tiny model, and kinds of runs."""

MODEL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 8
    --seq-length 16 --max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 62 --make-vocab-size-divisible-by 16
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --clip-grad 1.0
    --train-iters 6 --log-interval 1 --eval-iters 0 --eval-interval 1000
""".split()
LLAMA = """
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights
""".split()
DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "2000"]
SHORT = ["--train-iters", "3"]


def tp(degree: int) -> list[str]:
    """The tensor-parallel degree, as a flag."""
    return ["--tensor-model-parallel-size", str(degree)]
