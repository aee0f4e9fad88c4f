"""`--ntp-inject`: what can be said, and one clear error for what cannot."""

import pytest

from megatron_ntp.errors import PlanError
from megatron_ntp.inject.grammar import Fault, How, InjectError, Kind, Moment, When, parse


def test_the_example_of_the_documents() -> None:
    faults = parse(
        "kill:rank=3@step=7; hang:rank=1,after=0.2@save; nvml-lost:gpu=GPU-5ab,host=n1@step=5;"
        "nvml-lost:rank=2@load; corrupt-checkpoint:how=flip@save=8; corrupt-checkpoint@step=3;"
    )
    assert faults == (
        Fault(Kind.KILL, Moment(When.STEP, 7), rank=3),
        Fault(Kind.HANG, Moment(When.SAVE), rank=1, after_s=0.2),
        Fault(Kind.NVML_LOST, Moment(When.STEP, 5), gpu="GPU-5ab", host="n1"),
        Fault(Kind.NVML_LOST, Moment(When.LOAD), rank=2),
        Fault(Kind.CORRUPT, Moment(When.SAVE, 8), rank=0, how=How.FLIP),
        Fault(Kind.CORRUPT, Moment(When.STEP, 3), rank=0, how=How.TRUNCATE),
    )


@pytest.mark.parametrize(
    "text",
    [
        "kill:rank=3@step=7",
        "hang:rank=0,after=1.5@start",
        "nvml-lost:gpu=2,host=n1@save",
        "corrupt-checkpoint:rank=0,how=no-tracker@save=4",
    ],
)
def test_a_fault_prints_as_it_is_read(text: str) -> None:
    (fault,) = parse(text)
    assert str(fault) == text and parse(str(fault)) == (fault,)


def test_blanks_do_not_matter() -> None:
    assert parse("  kill : rank = 3 , after=1 @ step = 7 ;; ") == parse(
        "kill:rank=3,after=1@step=7"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no fault, such as kill:rank=3@step=7"),
        (" ; ", "names no fault"),
        ("explode:rank=1@step=2", "no kind 'explode'. There are: kill, hang, nvml-lost, corrupt-"),
        ("kill:rank=1", "no moment. Add @step=N, @save, @save=N, @load or @start"),
        ("kill:rank=1@", "no moment ''. There are: start, load, step, save"),
        ("kill:rank=1@lunch", "no moment 'lunch'"),
        ("kill:rank=1@step", "@step needs a number, such as @step=7"),
        ("kill:rank=1@step=", "@step is '', expected a whole number from 1"),
        ("kill:rank=1@step=0", "@step is '0', expected a whole number from 1"),
        ("kill:rank=1@step=-3", "@step is '-3'"),
        ("kill:rank=1@save=x", "@save is 'x'"),
        ("kill:rank=1@load=3", "@load takes no number"),
        ("kill@step=2", "needs rank=..."),
        ("hang:after=1@step=2", "needs rank=..."),
        ("nvml-lost@step=2", "needs gpu=... or rank=..."),
        ("nvml-lost:gpu=1,rank=1@step=2", "give only one of gpu=... or rank=..."),
        ("nvml-lost:rank=1,host=n1@step=2", "host belongs to gpu=..."),
        ("kill:gpu=1@step=2", "no key 'gpu'. Known here: rank, after"),
        ("kill:rank=1,rank=2@step=2", "rank is given twice"),
        ("kill:rank@step=2", "rank has no value"),
        ("kill:rank=@step=2", "rank has no value"),
        ("kill:rank=one@step=2", "rank is 'one', expected a global rank, counted from 0"),
        ("kill:rank=-1@step=2", "expected a global rank"),
        ("kill:rank=1,after=soon@step=2", "after is 'soon', expected seconds"),
        ("kill:rank=1,after=-1@step=2", "expected seconds"),
        ("kill:rank=1,after=nan@step=2", "expected seconds"),
        (
            "corrupt-checkpoint:how=burn@save",
            "no way 'burn'. There are: truncate, flip, no-",
        ),
        ("corrupt-checkpoint@load", "cannot happen at load, but @step or @save"),
        ("kill:rank=1@step=2; hang", "fault 'hang': no moment"),
    ],
)
def test_what_cannot_be_is_said_by_name(text: str, message: str) -> None:
    with pytest.raises(InjectError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("--ntp-inject")
    assert isinstance(caught.value, PlanError)
