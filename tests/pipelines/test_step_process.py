"""How the body of a step ends: codes, sentences, and no private word in the log."""

import json

import pytest

from fedemb.errors import BudgetExceeded
from fedemb.foundation.step_logging import EVENT_PREFIX
from fedemb.runtime.step import step_process


def _events(capfd):
    lines = capfd.readouterr().out.splitlines()
    return lines, [
        json.loads(line.removeprefix(EVENT_PREFIX))
        for line in lines
        if line.startswith(EVENT_PREFIX)
    ]


def test_fedemb_error_prints_one_sentence_and_exit_code(capfd):
    with pytest.raises(SystemExit) as caught, step_process("reserve_budget", {}):
        raise BudgetExceeded("the cap is reached; wait")
    assert caught.value.code == 3
    _, events = _events(capfd)
    assert events[-1]["message"] == "the cap is reached; wait"
    assert events[-1]["exit_code"] == 3


def test_unexpected_error_of_a_private_step_does_not_log_its_message(capfd):
    seen = "user Anna has 17 images"
    with pytest.raises(SystemExit) as caught, step_process("train_model", {}):
        raise ValueError(seen)
    assert caught.value.code == 1
    lines, events = _events(capfd)
    assert "Anna" not in "\n".join(lines)
    assert events[-1]["error"] == "ValueError"
    assert any("test_step_process" in line for line in lines)


def test_bug_in_a_public_step_keeps_its_message():
    with pytest.raises(ValueError, match="what went wrong"), step_process("plan_privacy", {}):
        raise ValueError("what went wrong")


def test_successful_step_logs_started_and_finished_events(capfd):
    with step_process("plan_privacy", {}):
        pass
    _, events = _events(capfd)
    assert [event["kind"] for event in events] == ["step_started", "step_finished"]
