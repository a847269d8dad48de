"""The spool: what was synced is settled once, whatever happens in between."""

import fcntl
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from billing.pricing import Prices
from billing.usage import Admission, Settlement
from gateway import spool


def settlement(tokens: int = 29) -> Settlement:
    admission = Admission(
        generation_id=uuid.uuid4(),
        organization_id=1,
        key_id=2,
        worker_id=uuid.uuid4(),
        model="acme/model:1",
        backend="demo",
        streamed=True,
        prices=Prices(Decimal("0.08"), Decimal("0.04"), Decimal("0.28")),
        hold=Decimal("0.000000000001"),
        created_at=datetime(2026, 11, 29, 12, 0, 0, 123456, tzinfo=UTC),
    )
    return Settlement(
        admission=admission,
        backend="other",
        state="succeeded",
        finished_at=datetime(2026, 11, 29, 12, 0, 1, 1, tzinfo=UTC),
        status_code=200,
        prompt_tokens=321,
        cached_tokens=302,
        completion_tokens=tokens,
        usage_source="reported",
        error="a line\nand “quotes”",
        latency_ms=523,
    )


class Books:
    """Stands for the database: remembers what was settled, refuses what it is told to."""

    def __init__(self) -> None:
        self.settled: list[Settlement] = []
        self.refuses: set[uuid.UUID] = set()
        self.is_away = False

    def settle(self, settlements: list[Settlement]) -> list[Settlement]:
        if self.is_away:
            raise ConnectionError
        refused = [one for one in settlements if one.admission.generation_id in self.refuses]
        self.settled += [one for one in settlements if one not in refused]
        return refused


@pytest.fixture
def books() -> Books:
    return Books()


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[spool.Spool]:
    opened = spool.Spool(tmp_path, uuid.uuid4())
    yield opened
    opened.close()


def test_it_works(mine: spool.Spool, books: Books) -> None:
    settlements = [settlement(), settlement()]
    mine.append(settlements[:1])
    mine.append(settlements[1:])
    assert mine.count == 2
    assert mine.replay(books.settle) == settlements == books.settled
    assert mine.count == 0
    assert mine.replay(books.settle) == []


def test_a_line_holds_all_of_a_settlement_to_the_last_digit() -> None:
    original = settlement()
    line = spool.dump(original)
    assert line.count(b"\n") == 1
    assert spool.load(line) == original
    assert spool.load(line).cost == original.cost


def test_a_file_stays_until_it_was_settled(mine: spool.Spool, books: Books) -> None:
    mine.append([settlement()])
    books.is_away = True
    with pytest.raises(ConnectionError):
        mine.replay(books.settle)
    books.is_away = False
    assert len(mine.replay(books.settle)) == 1


def test_another_process_leaves_the_file_of_a_live_one_alone(
    mine: spool.Spool, books: Books, tmp_path: Path
) -> None:
    mine.append([settlement()])
    assert spool.replay_orphans(tmp_path, books.settle) == []
    mine.close()  # as the end of its process does
    assert len(spool.replay_orphans(tmp_path, books.settle)) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_new_file_that_another_process_took_for_a_dead_ones_is_made_again(
    mine: spool.Spool, books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def late(file: int, how: int) -> None:
        monkeypatch.undo()
        spool.replay_orphans(tmp_path, books.settle)  # between the opening and the lock
        flock(file, how)

    monkeypatch.setattr("fcntl.flock", late)
    mine.append([settlement()])
    assert len(list(tmp_path.glob("*.jsonl"))) == 1
    assert len(mine.replay(books.settle)) == 1


def test_a_line_that_was_cut_off_is_passed_over(
    mine: spool.Spool, books: Books, tmp_path: Path
) -> None:
    mine.append([settlement()])
    mine.close()
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(file.read_bytes() + spool.dump(settlement())[:-20])
    assert len(spool.replay_orphans(tmp_path, books.settle)) == 1


def test_a_spoilt_line_is_set_aside_and_stops_nothing(
    mine: spool.Spool, books: Books, tmp_path: Path
) -> None:
    mine.append([settlement()])
    mine.close()
    (file,) = tmp_path.glob("*.jsonl")
    file.write_bytes(b'{"not": "a settlement"}\n' + file.read_bytes())
    assert len(spool.replay_orphans(tmp_path, books.settle)) == 1
    (aside,) = tmp_path.iterdir()
    assert aside.suffix == ".rejected"
    assert aside.read_bytes() == b'{"not": "a settlement"}\n'


def test_what_the_database_refuses_for_good_is_set_aside(
    mine: spool.Spool, books: Books, tmp_path: Path
) -> None:
    good, poisoned = settlement(), settlement()
    books.refuses = {poisoned.admission.generation_id}
    mine.append([poisoned, good])
    mine.replay(books.settle)
    assert books.settled == [good]
    (aside,) = tmp_path.glob("*.rejected")
    assert spool.load(aside.read_bytes()) == poisoned
    assert mine.replay(books.settle) == []


def test_nothing_is_taken_when_the_disk_takes_not_all(
    mine: spool.Spool, books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.append([settlement()])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            mine.append([settlement(), settlement()])
    assert mine.count == 1
    assert len(mine.replay(books.settle)) == 1


def test_no_one_else_can_read_it(mine: spool.Spool, tmp_path: Path) -> None:
    mine.append([settlement()])
    (file,) = tmp_path.glob("*.jsonl")
    assert file.stat().st_mode & 0o077 == 0
