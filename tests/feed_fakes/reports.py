"""Reports as workers send them."""

from splitserve.engine.protocol import Load, Role, StepReport, WorkerFacts, WorkerId

FACTS = WorkerFacts(page_tokens=4, total_pages=64, max_model_tokens=4096)


def report(worker: str = "w", number: int = 0, **changes: object) -> StepReport:
    """A snapshot of an idle prefill worker, but for ``changes``."""
    fields: dict[str, object] = {
        "incarnation": 1,
        "role": Role.PREFILL,
        "facts": FACTS,
        "updates": [],
        "stored": [],
        "removed": [],
        "load": Load(free_pages=64, total_pages=64),
        "step_s": 0.0,
        "prefill_tokens": 0,
        "decode_tokens": 0,
        "steps": 1,
        "counters": None,
    }
    return StepReport(worker=WorkerId(worker), number=number, **{**fields, **changes})  # type: ignore[arg-type]
