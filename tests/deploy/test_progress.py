"""Lines for whoever waits."""

import pytest

from splitserve.deploy.progress import Progress


def test_a_stage_is_said_once_and_repeated_when_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(quiet_s=0.01) as progress:
        progress.say("starting Ray")
        progress.say("starting Ray")
        lines: list[str] = []
        for _ in range(500):
            lines += capsys.readouterr().out.splitlines()
            if len(lines) > 2:
                break
            progress._pulse.join(0.01)
        progress.rest()
    assert lines[0] == "splitserve: starting Ray"
    assert lines[1] == "splitserve: starting Ray (0 s)"
    assert not progress._pulse.is_alive()
