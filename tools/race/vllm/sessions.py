"""The sessions of a race: groups that share a system prompt, turns that repeat all turns before, arrivals by seed. The same seed
gives the same sessions to each router."""

import dataclasses
import random
import statistics
import threading
import time

import chat
from chat import Answer

FAILURES_SHOWN_MAX = 5
# The maximum number of sessions that run at the same time. Each session is a thread, and the machine may be small.
SESSIONS_MAX = 512
WORDS = (
    "water light house river green stone paper train small cloud winter market garden letter music table summer window simple "
    "answer bridge castle doctor engine family forest glass hammer island jacket kitchen ladder mirror number orange pencil "
    "question rabbit school teacher umbrella village weather yellow animal butter circle dinner evening flower golden history"
).split()


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a workload."""

    sessions: int = 12
    turns: int = 4
    groups: int = 4
    system_words: int = 400
    turn_words: int = 40
    reply_tokens: int = 8
    # The number of sessions that begin per second, and the pause between two turns of a session, in seconds.
    rate: float = 0.25
    think_seconds: float = 0.5


@dataclasses.dataclass(frozen=True)
class Session:
    at: float
    system: str
    questions: tuple[str, ...]


@dataclasses.dataclass
class Report:
    """The totals of a load, as its clients saw it."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    first_ms: float = 0.0
    whole_ms: float = 0.0
    failures: list[str] = dataclasses.field(default_factory=list)


def words(generator: random.Random, count: int) -> str:
    return " ".join(generator.choice(WORDS) for _ in range(count))


def plan(shape: Shape, seed: int, salt: str) -> list[Session]:
    """Returns the sessions. `salt` begins each system prompt, so that no run finds prompts of another run in the caches."""
    if shape.sessions > SESSIONS_MAX:
        raise ValueError(f"at most {SESSIONS_MAX} sessions")
    generator = random.Random(seed)
    systems = [f"{salt} You answer briefly. Your words are: {words(generator, shape.system_words)}." for _ in range(shape.groups)]
    sessions, at = [], 0.0
    for _ in range(shape.sessions):
        questions = tuple(f"Which of these do you like? {words(generator, shape.turn_words)}" for _ in range(shape.turns))
        sessions.append(Session(at, generator.choice(systems), questions))
        at += generator.expovariate(shape.rate)
    return sessions


def converse(url: str, model: str, session: Session, shape: Shape, stop: threading.Event, answers: list[Answer]) -> None:
    """Plays all turns of one session, which ends with its first failure."""
    messages = [{"role": "system", "content": session.system}]
    for question in session.questions:
        messages.append({"role": "user", "content": question})
        answer = chat.ask(url, chat.body(model, messages, shape.reply_tokens))
        answers.append(answer)
        if answer.failed:
            return
        messages.append({"role": "assistant", "content": answer.text})
        if stop.wait(shape.think_seconds):
            return


def run(url: str, model: str, shape: Shape, seed: int, salt: str, stop: threading.Event | None = None) -> list[Answer]:
    """Starts each session at its time and waits for all. `stop` ends the arrivals and the turns."""
    stop, answers, threads, began = stop or threading.Event(), [], [], time.monotonic()
    for session in plan(shape, seed, salt):
        if stop.wait(max(0.0, began + session.at - time.monotonic())):
            break
        thread = threading.Thread(target=converse, args=(url, model, session, shape, stop, answers), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return answers


def summarize(answers: list[Answer]) -> Report:
    good = [answer for answer in answers if not answer.failed]
    mean = lambda values: round(1000 * statistics.fmean(values), 1) if values else 0.0
    return Report(
        requests=len(answers),
        failed=len(answers) - len(good),
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        completion_tokens=sum(answer.completion_tokens for answer in good),
        cached_tokens=sum(answer.cached_tokens for answer in good),
        first_ms=mean([answer.first for answer in good if answer.first]),
        whole_ms=mean([answer.whole for answer in good]),
        failures=[answer.error for answer in answers if answer.failed][:FAILURES_SHOWN_MAX],
    )
