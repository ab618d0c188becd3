"""Damaged files: a model, and what lies beside it. Whatever a file says, there is an
answer or one sentence, within the memory that was given.

So many damaged files of each kind (fewer where one takes long) are read by what reads
them, many in one process. Bytes of them change, or the file is well formed and says
something else: arrays of other types and shapes, a GGUF's fields, several numbers that
are multiplied, its vocabulary, JSON, a grammar's words, or what is legal and huge.
Before those come what is not left to chance: a pipe without a writer, what has ended
processes elsewhere (no layers, too many, tensors that overlap, huge strings, hostile
chat templates), and each of a model's numbers saying another one. A model goes through
what `inspect`, `run`, `convert` and `serve` do with it. Where a model stays open
meanwhile, its next answer must be the right one.

A case that is ended by a signal, that takes more memory than its bound, that says more
than a sentence, or hangs, is a finding; so is any exception that is not the library's
own. `--only KIND --first N --count 1` does a case again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from common import (
    ADDRESS_SPACE,
    DEADLINE,
    PROMPT,
    ROOT,
    Case,
    Child,
    answer,
    case_rng,
    findings_by_seed,
    import_all,
    in_workers,
    judged,
    main,
    open_model,
    options_of,
    tell_all,
    verdict,
    write_small_model,
)
from moeoff.errors import MoeoffError
from moeoff.gguf.file import ModelFile
from mutants import (
    DEEP,
    GRAMMAR,
    MARK,
    SCHEMA,
    TEXTS,
    WORDS,
    Header,
    Mutant,
    mutate,
    mutate_arrays,
    mutate_gguf,
    mutate_json,
    mutate_text,
    named_mutants,
    unpacks_to,
    value_mutants,
)

sys.path.insert(0, str(ROOT / "scripts" / "models"))
from companions import write_control_vector, write_expert_adapter, write_projector
from model_writer import write_arrays

MEMORY = 300 << 20
OPENED = {"n_threads": 1, "n_ctx": 64}


Reader = Callable[[Path, random.Random], object]


class Kind(NamedTuple):
    """Files of a kind.

    Attributes:
        name: of the whole one, in the folder that `prepare` fills.
        use: makes what reads one, in the folder; the model is m.gguf there.
        share: how many are tried, of as many as are asked for.
        allowed: errors of others with which a reader may end.
        opens: the reader is given a path, and opens it.
    """

    name: str
    use: Callable[[Path], Reader]
    share: float = 1.0
    allowed: tuple[type[Exception], ...] = ()
    opens: bool = True


def prepare(folder: Path, names: set[str]) -> None:
    """A whole file of each kind; profiles take seconds, and are made if they are among
    the names.
    """
    from moeoff.experts.convert import convert
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.measure.profile_fit import calibrate
    from moeoff.policies import hobbit

    hobbit.MAX_EVENTS = 128  # of this process: what it learns need not be good
    model = str(folder / "m.gguf")
    write_small_model(model)
    model_index = ModelIndex.read(model)
    sidecar = convert(model, tiers="original,Q4_0", output=folder / "m.experts.gguf").path
    (folder / "text.txt").write_text((PROMPT + "\n") * 60)
    if names & {"m.profile.npz", "contract.npz"}:
        calibrate(
            model,
            text=[str(folder / "text.txt")],
            tokens=512,
            memory="2G",
            output=folder / "m.profile.npz",
            n_threads=1,
        )
        write_contract(folder, sidecar)
    (folder / "plan.json").write_text(
        json.dumps({"default": "Q4_0", "layers": {"0": {"0": "Q8_0", "1": "original"}, "1": "F16"}})
    )
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    (folder / "grammar.gbnf").write_text(GRAMMAR)
    sums = {}
    for name, span in list(model_index.experts.items())[:4]:
        sums |= {
            f"{name}.in_sum2": np.ones((span.shape[2], span.shape[0])),
            f"{name}.counts": np.ones((span.shape[2], 1)),
        }
    write_arrays(
        folder / "imatrix.gguf",
        {"general.architecture": "imatrix", "general.type": "imatrix"},
        sums,
    )
    write_expert_adapter(model, folder / "adapter.gguf")
    n_embd = int(model_index.hparams["embedding_length"])
    write_projector(folder / "projector.gguf", n_embd)
    write_control_vector(folder / "vector.gguf", model_index.architecture, np.ones(n_embd))
    with open_model(model, **OPENED, warm=True, trace=str(folder / "run.trace")) as llm:
        answer(llm)
    shutil.copy(warm_file(), folder / "warm.npz")


def write_contract(folder: Path, sidecar: str) -> None:
    from moeoff.budget.loss_contract import Candidate, LossContract
    from moeoff.experts.profile import Profile
    from moeoff.experts.sidecar import Sidecar
    from moeoff.gguf.model_index import ModelIndex

    shutil.copy(folder / "m.profile.npz", folder / "contract.npz")
    candidates = [
        Candidate("original", 0.1, share, 0.001, 0.002, 0.001, 0.6) for share in (0.1, 0.25, 0.75)
    ]
    candidates.append(Candidate("Q4_0", 0.0, 0.0, 0.001, 0.002, 0.001, 0.6, size=0.6))
    contract = LossContract(Sidecar(sidecar).identity, 1, 8, 4096, 512, tuple(candidates))
    Profile.write(
        folder / "contract.npz",
        ModelIndex.read(folder / "m.gguf"),
        {"precision": contract.to_section()},
    )


def warm_file() -> Path:
    return next(Path(os.environ["XDG_CACHE_HOME"]).glob("moeoff/warm/*.npz"))


# each is called once in a process, and gives what reads a file


def open_and_answer(_folder: Path) -> Reader:
    """Texts become tokens, and tokens text."""
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.gguf.preflight import preflight
    from moeoff.llamacpp import templates

    def read(path: Path, _rng: random.Random) -> None:
        model_index = ModelIndex.read(path)
        model_index.require_experts()
        preflight(model_index)
        with open_model(str(path), **OPENED, expert_memory=None, memory=MEMORY) as llm:
            tokens = [
                token
                for text in TEXTS
                for token in llm.tokenize(text.encode("utf-8", "replace"), special=True)
            ]
            llm.detokenize(tokens)
            if template := llm.metadata.get("tokenizer.chat_template"):
                templates.check(template)
            llm.create_completion(tokens[:8] or [0], max_tokens=2, temperature=0.0)

    return read


def converted(folder: Path) -> Reader:
    from moeoff.experts.convert import convert

    return lambda path, _rng: convert(
        str(path), tiers="original,Q4_0", output=folder / "made.gguf", force=True, threads=1
    )


def inspected(_folder: Path) -> Reader:
    from moeoff.cli.main import main as moeoff_main

    def read(path: Path, _rng: random.Random) -> None:
        try:
            moeoff_main(["inspect", str(path), "--probe", "off"], standalone_mode=False)
        except click.ClickException as error:
            raise MoeoffError(error.message) from None

    return read


def confined(body: Callable[[], object], folder: Path) -> None:
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    body()


def command(args: list[str]) -> None:
    from moeoff.cli.main import main as moeoff_main

    moeoff_main(args)


def serve(path: Path, **options: Any) -> None:
    """Starts a server, asks it twice if it starts, and stops it."""
    import moeoff

    try:
        with moeoff.Server(
            str(path), port=0, memory=MEMORY, n_ctx=256, parallel=1, warm=False, **options
        ) as server:
            for text in ("Hi", "now"):
                body = json.dumps(
                    {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
                ).encode()
                request = urllib.request.Request(
                    f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
                )
                with contextlib.suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(request, timeout=DEADLINE).read()
            urllib.request.urlopen(f"{server.url}/health", timeout=DEADLINE).read()
    except moeoff.MoeoffError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)


def in_child(body: Callable[[], object], folder: Path, quiet: bool) -> None:
    """Raises what the child has said, or what is wrong with how it ended."""
    child = Child(functools.partial(confined, body, folder))
    code = child.wait(DEADLINE - 10)
    if wrong := verdict(code, child.errors, peak=child.peak, memory=MEMORY, quiet=quiet):
        raise AssertionError(wrong)
    if code:
        raise MoeoffError(child.errors.strip().splitlines()[-1].removeprefix("Error: "))


def run_in_child(folder: Path) -> Reader:
    """The command itself, with its budget."""
    options = [
        "-c",
        "64",
        "--warm",
        "off",
        "--profile",
        "none",
        "--experts",
        "none",
        "-t",
        "1",
        "--memory",
        str(MEMORY),
    ]
    return lambda path, _rng: in_child(
        functools.partial(command, ["run", "-m", str(path), "-p", "Hi", "-n", "2", *options]),
        folder,
        True,
    )


def read_sidecar(folder: Path) -> Reader:
    from moeoff.experts.sidecar import Sidecar
    from moeoff.gguf.model_index import ModelIndex

    model_index = ModelIndex.read(folder / "m.gguf")

    def read(path: Path, _rng: random.Random) -> None:
        sidecar = Sidecar(path)
        sidecar.check_belongs(model_index)
        for span in model_index.experts.values():
            list(sidecar.sources(span, "original"))

    return read


def verify_sidecar(folder: Path) -> Reader:
    from moeoff.experts.verify import verify

    return lambda path, _rng: verify(path, model=str(folder / "m.gguf"))


def read_profile(folder: Path) -> Reader:
    from moeoff.experts.profile import Profile
    from moeoff.gguf.model_index import ModelIndex

    model_index = ModelIndex.read(folder / "m.gguf")
    return lambda path, _rng: Profile.read(path, model_index, room=MEMORY // 2)


def read_plan(folder: Path) -> Reader:
    from moeoff.experts.tiers import read_plan
    from moeoff.gguf.model_index import ModelIndex

    model_index = ModelIndex.read(folder / "m.gguf")
    return lambda path, _rng: read_plan(path, model_index.experts)


def read_imatrix(_folder: Path) -> Reader:
    from moeoff.gguf.imatrix import Imatrix

    return lambda path, _rng: Imatrix.read(path)


def read_trace(_folder: Path) -> Reader:
    from moeoff.routing.trace import Trace

    return lambda path, _rng: Trace.read(path).counts()


def opened(option: str, *strategies: str, **others: Any) -> Callable[[Path], Reader]:
    """A model is opened with the file, under one of these strategies, and answers."""

    def use(folder: Path) -> Reader:
        paths = {
            key: str(folder / value) if key == "experts" else value for key, value in others.items()
        }

        def read(path: Path, rng: random.Random) -> None:
            if option == "warm":
                shutil.copy(path, warm_file())
            options = {
                option: True if option == "warm" else str(path),
                "strategy": rng.choice(strategies or ("lru",)),
            }
            with open_model(
                str(folder / "m.gguf"), **OPENED | {"expert_memory": "200K"} | paths | options
            ) as llm:
                answer(llm)

        return read

    return use


def of_open_model(read: Callable[[Any, Path], object]) -> Callable[[Path], Reader]:
    """A model that stays open takes the file; its next answer is the one that it gave
    before.
    """

    def use(folder: Path) -> Reader:
        llm = open_model(str(folder / "m.gguf"), **OPENED)
        expected = answer(llm)

        def check(path: Path, _rng: random.Random) -> None:
            try:
                read(llm, path)
            finally:
                if (tokens := answer(llm)) != expected:
                    raise AssertionError(f"the next answer is {tokens}, expected {expected}")

        return check

    return use


def grammar(llm: Any, path: Path) -> None:
    from llama_cpp import LlamaGrammar

    text = path.read_bytes().decode(errors="replace")
    llm.create_completion("Hi", max_tokens=4, grammar=LlamaGrammar.from_string(text, verbose=False))


def schema(llm: Any, path: Path) -> None:
    from llama_cpp import LlamaGrammar

    llm.create_completion(
        "Hi",
        max_tokens=4,
        grammar=LlamaGrammar.from_json_schema(
            path.read_bytes().decode(errors="replace"), verbose=False
        ),
    )


def text(llm: Any, path: Path) -> None:
    from moeoff.measure.perplexity import read_windows

    read_windows(llm, [path], 32)


def served(option: str) -> Callable[[Path], Reader]:
    """A server starts with the file, in a child: as its model, as an option of its own,
    or of llama-server's.
    """

    def use(folder: Path) -> Reader:
        def read(path: Path, _rng: random.Random) -> None:
            model, options = (
                (path, {})
                if option == "model"
                else (
                    folder / "m.gguf",
                    {"args": [option, str(path)]}
                    if option.startswith("--")
                    else {option: str(path)},
                )
            )
            in_child(functools.partial(serve, model, **options), folder, False)

        return read

    return use


# what unpacks to more is refused; without a bound of the process half of what is
# available may
BOUNDED = {"expert_memory": None, "memory": MEMORY}
_LLAMA_CPP = (Exception,)  # what llama_cpp's own readers raise is theirs
KINDS = {
    "model": Kind("m.gguf", open_and_answer),
    "model, run": Kind("m.gguf", run_in_child, 0.2),
    "model, convert": Kind("m.gguf", converted, 0.1),
    "model, inspect": Kind("m.gguf", inspected, 0.1),
    "model, served": Kind("m.gguf", served("model"), 0.1),
    "sidecar": Kind("m.experts.gguf", read_sidecar),
    "sidecar, verify": Kind("m.experts.gguf", verify_sidecar, 0.1),
    "sidecar, open": Kind("m.experts.gguf", opened("experts", tier="Q4_0"), 0.2),
    "profile": Kind("m.profile.npz", read_profile),
    "profile, open": Kind(
        "m.profile.npz",
        opened("profile", "auto", "fate", "promoe", "edgemoe", "hobbit", "score", "lru", **BOUNDED),
        0.3,
    ),
    "contract": Kind(
        "contract.npz",
        opened("profile", "lru", "auto", max_loss="1%", experts="m.experts.gguf", **BOUNDED),
        0.2,
    ),
    "warm state": Kind("warm.npz", opened("warm", "lru", "auto"), 0.2, opens=False),
    "plan": Kind("plan.json", read_plan),
    "importance matrix": Kind("imatrix.gguf", read_imatrix),
    "trace": Kind("run.trace", read_trace),
    "adapter": Kind("adapter.gguf", opened("lora_path", **BOUNDED), 0.2),
    "adapter, served": Kind("adapter.gguf", served("--lora"), 0.03),
    "control vector": Kind("vector.gguf", served("--control-vector"), 0.03),
    "projector": Kind("projector.gguf", served("mmproj"), 0.03),
    "draft": Kind("m.gguf", served("draft"), 0.03),
    "grammar": Kind("grammar.gbnf", of_open_model(grammar), allowed=_LLAMA_CPP, opens=False),
    "JSON schema": Kind("schema.json", of_open_model(schema), allowed=_LLAMA_CPP, opens=False),
    "text": Kind("text.txt", of_open_model(text)),
}
ARRAYS_OF = {
    "m.profile.npz": "popularity/counts",
    "contract.npz": "precision/t1",
    "warm.npz": "high",
}


def of_model(folder: Path) -> Iterator[Mutant]:
    return itertools.chain(
        named_mutants(str(folder / "m.gguf")), value_mutants(str(folder / "m.gguf"))
    )


def named(name: str, whole: bytes) -> list[bytes]:
    """Return the cases that are tried always, for files that are no models."""
    if name.endswith(".json"):
        return DEEP
    if name.endswith(".npz"):
        return [unpacks_to(whole, f"{ARRAYS_OF[name]}-more", 1 << 30)]
    return [word.encode() for word in WORDS] if name.endswith(".gbnf") else []


def damaged(name: str, whole: bytes, rng: random.Random) -> bytes:
    """Return a damaged copy of a file that is no GGUF: with changed bytes, or well
    formed with other content.
    """
    if rng.random() < 0.3:
        return mutate(whole, rng)
    if name.endswith(".npz"):
        return mutate_arrays(whole, rng)
    if name.endswith(".json"):
        return mutate_json(whole, rng)
    return mutate_text(whole, rng) if name.endswith((".gbnf", ".txt")) else mutate(whole, rng)


def worker(folder: Path, kind: str, seed: int) -> Callable[[int], tuple[str, str]]:
    name, use, _, allowed, opens = KINDS[kind]
    os.chdir(folder)  # where a template that runs code would leave its mark
    whole, path, pipe, mark = (
        (folder / name).read_bytes(),
        folder / f"bad{Path(name).suffix}",
        folder / "pipe",
        folder / MARK,
    )
    if not pipe.exists():
        os.mkfifo(pipe)
    header, certain, read = None, named(name, whole), use(folder)
    if name.endswith(".gguf"):
        with ModelFile(folder / name) as file:
            header = Header(file.header())
    n_certain = sum(1 for _ in of_model(folder)) if kind.startswith("model") else len(certain)

    def write(n: int, rng: random.Random) -> str:
        """Says what was done."""
        if header is not None:
            mutant = (
                next(itertools.islice(of_model(folder), n - 1, None))
                if 0 < n <= n_certain
                else mutate_gguf(header, whole, rng)
            )
            mutant.write(path, header.whole, whole[len(header.whole) :])
            return f"{mutant.what[:200]}: "
        path.write_bytes(certain[n - 1] if 0 < n <= n_certain else damaged(name, whole, rng))
        return ""

    def check(n: int) -> tuple[str, str]:
        rng = case_rng(seed, n, kind)
        if n == 0 and opens:
            outcome, problem = judged(lambda: read(pipe, rng), str(pipe), allowed=allowed)
            return outcome, problem or (
                "" if outcome == "refused" else "a pipe was taken for a file"
            )
        what = write(n, rng)
        outcome, problem = judged(lambda: read(path, rng), str(path), allowed=allowed)
        if mark.exists():
            mark.unlink()
            problem += " the template has run code"
        return outcome, problem and f"{what}{problem}"

    return check


def check_files(
    count: int, first: int, seed: int, only: tuple[str, ...]
) -> Iterator[tuple[str, Case]]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        kinds = {name: kind for name, kind in KINDS.items() if not only or name in only}
        child = Child(functools.partial(prepare, folder, {kind.name for kind in kinds.values()}))
        if child.wait(10 * DEADLINE) != 0:
            raise click.ClickException(f"the whole files cannot be made: {child.errors[-2000:]}")
        for name, kind in kinds.items():
            numbers = range(first, first + max(round(count * kind.share), 1))
            for case in in_workers(
                functools.partial(worker, folder, name, seed), numbers, memory=MEMORY, life=500
            ):
                yield name, case


@main.command(help=__doc__)
@click.option("--count", default=2000, show_default=True, help="Files of each kind.")
@click.option("--first", default=0, show_default=True, help="Number of the first.")
@options_of(KINDS, seeds=True)
def files(
    count: int, first: int, seeds: tuple[int, ...], only: tuple[str, ...], json_file: str | None
) -> None:
    import_all()
    columns = ["what", "files", "refused in one sentence", "accepted", "problems"]
    with (
        findings_by_seed(json_file, "files", "damaged files", columns, seeds) as (tables, problems),
        tempfile.TemporaryDirectory() as name,
    ):
        os.environ["XDG_CACHE_HOME"] = name
        for seed, table in tables:
            problems += tell_all(table, check_files(count, first, seed, only), f"--seed {seed}")
