"""Every error that megatron-ntp raises on purpose.

Two families. `PlanError` is a `ValueError`: a setting, a plan file or a job shape is wrong, and no
rank has started to train. `NTPError` is a `RuntimeError`: something failed while ranks run. Each
kind of failure that a caller may want to tell apart has its own class. Messages state the rule that
failed, the values, and what to do.

This module imports nothing, so that every layer can use it.
"""


class NTPError(RuntimeError):
    """Base of the errors raised while a job runs."""


class StartError(NTPError):
    """A rank cannot start to train: a rank is missing, or its Megatron is not what it must be."""


class OtherRankFailedError(NTPError):
    """This rank learnt that another one has failed, but not why: that one says it."""


class CheckpointError(NTPError):
    """A checkpoint cannot be used for this job, or could not be written."""


class NoCheckpointError(CheckpointError):
    """There is nothing to load, and starting from random weights was not asked for."""


class DamagedFileError(CheckpointError):
    """A file of a checkpoint is torn, or is not what its name says."""


class PlanError(ValueError):
    """Base of the errors raised while a plan is made, read or checked."""


class PlanFileError(PlanError):
    """A plan file cannot be read or written."""


class PlanFormatError(PlanError):
    """The text of a plan is not one JSON object."""


class PlanVersionError(PlanError):
    """The plan was written in a format that this version does not read."""


class PlanKeyError(PlanError):
    """A plan lacks a key, or has one that means nothing here."""


class PlanTypeError(PlanError):
    """A value has the wrong type, or is an integer outside its range."""


class PlanDimsError(PlanError):
    """Model sizes contradict each other."""


class PlanModelError(PlanError):
    """The plan was made for another model than the one at hand."""


class PlanWorldError(PlanError):
    """The number of started processes is not the number that the plan needs."""


class PlanUnitsError(PlanError):
    """A family has fewer units than a replica has tensor-parallel ranks."""


class PlanTopologyError(PlanError):
    """Replicas, degrees and failed slots do not describe a job that can run."""


class PlanBatchError(PlanError):
    """The batch policy cannot be met with this number of microbatches."""


class PlanLookupError(PlanError):
    """A degree, rank, slot or family was asked for that the plan does not have."""


class UnsupportedFlagError(PlanError):
    """A flag of Megatron, or of NTP, cannot be used with the others."""


class SettingsFileError(PlanError):
    """The file of --ntp-config cannot be read, or says something that the flags do not."""


class PowerSettingsError(PlanError):
    """A flag of the power boost, or its site file, cannot be meant as it stands."""
