"""A store that fails: asked again where that may help, and an error that says why where it does not."""

import threading
import warnings

import pytest
from obstore import exceptions
from obstore.store import LocalStore, MemoryStore
from support.shards import InMemory, Watched, numbers, packed, samples, streams

from helpers.loading import shards
from helpers.loading.shards import asking


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The pauses that were made, instead of making them."""
    made = []

    class Event(threading.Event().__class__):
        def wait(self, timeout=None):
            made.append(timeout)
            return self.is_set()

    monkeypatch.setattr(asking.threading, "Event", Event)
    return made


def answer(status, text="Server returned non-2xx status code: {}: <?xml><Message>Because of me.</Message>"):
    return exceptions.GenericError(f"Generic S3 error: {text.format(status)}")


NO_ANSWER = exceptions.GenericError("Generic S3 error: HTTP error: error sending request")
MAY_PASS = [NO_ANSWER, *map(answer, ("500 Internal Server Error", "503 Slow Down", "429", "408")), OSError("cable cut")]


def failing(error, times):
    """A request that fails some times before it is answered."""
    left = iter([error] * times)

    def request():
        for each in left:
            raise each
        return "content"

    return request


@pytest.mark.parametrize("error", MAY_PASS, ids=str)
def test_what_may_pass_is_asked_for_again_and_said_once(error, pauses):
    with pytest.warns(UserWarning, match="a shard: asking again, since: ") as said:
        assert asking.ask(failing(error, 4), "a shard") == "content"
    assert len(said) == 1
    assert len(pauses) == 4


def test_the_pauses_double_up_to_five_seconds_and_differ_from_reader_to_reader(pauses):
    with pytest.warns(UserWarning):
        asking.ask(failing(NO_ANSWER, 9), "a shard")
    longest = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5]
    assert all(0.5 * most <= pause <= most for pause, most in zip(pauses, longest, strict=True))
    assert len({pause / most for pause, most in zip(pauses, longest, strict=True)}) > 5


def test_when_patience_ends_the_store_has_failed(monkeypatch, pauses):
    now = [0.0]
    monkeypatch.setattr(asking.time, "monotonic", lambda: now.__setitem__(0, now[0] + 4) or now[0])
    with (
        pytest.warns(UserWarning),
        pytest.raises(shards.StoreFailed, match="found none for 10 s. Is it running.*error sending"),
    ):
        asking.ask(failing(NO_ANSWER, 99), "a shard", patience=10)
    assert len(pauses) == 3


def test_without_patience_the_first_failure_is_the_error(pauses):
    with warnings.catch_warnings(), pytest.raises(shards.StoreFailed):
        warnings.simplefilter("ignore")
        asking.ask(failing(NO_ANSWER, 1), "a shard", patience=0)
    assert not pauses


@pytest.mark.parametrize("status", ["400 Bad Request", "401", "403 Forbidden", "405"])
def test_a_refusal_is_an_error_at_once_in_the_words_of_the_store(status, pauses):
    with pytest.raises(shards.StoreRefused, match="a shard: the store refuses this. .* It says: Because of me.$"):
        asking.ask(failing(answer(status), 1), "a shard")
    assert not pauses


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), answer("404 Not Found")], ids=str)
def test_what_is_not_there_is_not_asked_for_again(error, pauses):
    with pytest.raises(FileNotFoundError, match="a shard: not in the store"):
        asking.ask(failing(error, 1), "a shard")
    assert not pauses


def test_an_error_of_the_callers_own_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError):
        asking.ask(lambda: 1 / 0, "a shard")


def test_when_nobody_waits_any_more_it_is_not_asked_again():
    stop = threading.Event()
    asked = []

    def request():
        asked.append(1)
        stop.set()
        raise NO_ANSWER

    with pytest.warns(UserWarning), pytest.raises(shards.StoreFailed, match="nobody waits"):
        asking.ask(request, "a shard", stop=stop)
    assert len(asked) == 1


def test_writing_and_joining_ask_again_too():
    class Flaky:
        """Each request fails the first time."""

        def __init__(self):
            self.store, self.asked = MemoryStore(), set()

        def __getattr__(self, name):
            def call(*arguments, **options):
                if (name, arguments[0]) not in self.asked:
                    self.asked.add((name, arguments[0]))
                    raise NO_ANSWER
                return getattr(self.store, name)(*arguments, **options)

            return call

    flaky = Flaky()
    with pytest.warns(UserWarning, match="asking again"):
        for task in range(2):
            shards.pack(samples(20), flaky, task=task, tasks=2)
        assert shards.join(flaky) == shards.Index.load(flaky)
    assert {name for name, _ in flaky.asked} == {"put", "list", "get"}


# ------------------------------------------------------------------------------------------- shards that have changed


class Replaced:
    """A store in which one shard has another content."""

    def __init__(self, store, name, change):
        self.store, self.changed, self.requests = MemoryStore(), name, 0
        for page in store.list():
            for entry in page:
                content = bytes(store.get(entry["path"]).bytes())
                self.store.put(entry["path"], change(content) if entry["path"] == name else content)

    def get_range(self, path, **where):
        self.requests += path == self.changed
        return self.store.get_range(path, **where)

    def __getattr__(self, name):
        return getattr(self.store, name)


def flipped(content):
    return content[:20_000] + bytes([content[20_000] ^ 1]) + content[20_001:]


DAMAGES = {
    "cut off": (lambda content: content[:20_000], "expected 4.,... bytes, found 20,000: it was cut off"),
    "cut off before a piece": (lambda content: content[:100], "expected 4.,... bytes, found 100: it was cut off"),
    "empty": (lambda content: b"", "expected 4.,... bytes, found 0: it was cut off"),
    "replaced": (
        lambda content: b"other" + content,
        "expected 4.,... bytes, found 4.,...: another shard has replaced it",
    ),
    "damaged": (
        flipped,
        r"expected the CRC32C [0-9a-f]{8} of bytes 1.,... to 2.,..., found [0-9a-f]{8}: bytes of it are damaged",
    ),
}


@pytest.mark.parametrize("place", ["memory", "folder"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_that_is_not_as_it_was_is_named_with_what_happened_to_it(damage, place, tmp_path):
    change, message = DAMAGES[damage]
    bucket, index = packed(300)
    name = "shard-00000-000001.tar"
    changed = Replaced(bucket.store, name, change)
    if place == "folder":
        folder = LocalStore(tmp_path)
        for page in changed.store.list():
            for entry in page:
                folder.put(entry["path"], bytes(changed.store.get(entry["path"]).bytes()))
        changed.store = folder
    with pytest.raises(shards.DamagedShard, match=f"^memory/{name}: {message}"):
        numbers(streams(InMemory(changed), index, 10))


def test_a_shard_that_is_missing_is_named():
    bucket, index = packed(300)
    bucket.store.delete("shard-00000-000001.tar")
    with pytest.raises(shards.MissingShard, match="^memory/shard-00000-000001.tar: in the index, but not in the store"):
        numbers(streams(bucket, index, 10))


def test_a_piece_that_was_damaged_on_its_way_is_asked_for_once_more():
    bucket, index = packed(300)

    class Noisy(Watched):
        def get_range(self, path, **where):
            content = bytes(super().get_range(path, **where))
            return content if self.requests % 2 == 0 else flipped(content * 9)[: len(content) - 1]

    noisy = Noisy(bucket.store)
    found = numbers(streams(InMemory(noisy), index, 10, threads=1))
    assert sorted(found) == list(range(300))
    assert noisy.requests == 2 * len(index.pieces)


def test_a_name_that_looks_like_a_status_changes_nothing():
    """A failing store was once taken for a shard that is too short, if its number was 416."""
    error = exceptions.GenericError("GET http://host:41600/shard-00000-000416.tar: HTTP error: error sending request")
    bucket, index = packed(30)
    down = iter([error])

    def before():
        for each in down:
            raise each

    with pytest.warns(UserWarning, match="asking again"):
        assert sorted(numbers(streams(InMemory(Watched(bucket.store, before)), index, 10))) == list(range(30))
