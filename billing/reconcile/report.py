"""What a look at the books returns. Values only."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

# A look lists no more breaks of one kind: a wrong price must not fill the table of findings.
LISTED_MAX = 1000


@dataclass(frozen=True, slots=True)
class Break:
    """Something that breaks an invariant: `subject` is the same each time it is found."""

    subject: str
    detail: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.detail}"


@dataclass(slots=True)
class Report:
    """One look: how many rows were looked at, and what breaks; `notes` are for who reads along."""

    invariant: str
    counted: int
    findings: list[Break] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, subject: str, detail: str) -> None:
        self.findings.append(Break(subject, detail))


@dataclass(frozen=True, slots=True)
class Check:
    """A look that can be asked for by name; `hours` is how far it looks back if not at all.

    One that `is_slow` looks at everything only where it is asked for by its name.
    """

    name: str
    look: Callable[[datetime | None], Report]
    hours: int = 1
    is_slow: bool = False

    def since(self, now: datetime) -> datetime:
        return now - timedelta(hours=self.hours)
