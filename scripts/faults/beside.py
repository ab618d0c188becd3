"""Damaged files beside a model: sidecar, profile, contract, warm state, prompt cache, plan, importance matrix, traces, adapter, control vector, projector, draft,
grammar, text.

usage: beside.py [--count N] [--first N] [--seed N ...] [--only KIND ...] [--json FILE]

So many damaged files of each kind (fewer where one takes long) are read by what reads them, many in one process. Bytes of them change, or the file is well
formed and says something else: arrays of other types and shapes, a GGUF's header, JSON, a grammar's words, or what is legal and huge. The first of each kind
that moeoff opens itself is a pipe without a writer. Where a model stays open meanwhile, its next
answer must be the right one. A case that is ended by a signal, that takes more memory than its bound, that says more than a sentence, or hangs, is a finding;
so is any exception that is not the library's own. Exit code 1 if there is one. `--only KIND --first N --count 1` does a case again.
"""

from __future__ import annotations

import functools
import gzip
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from common import (
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
    json_option,
    judged,
    open_model,
    seeds_option,
    status_bytes,
    tell_all,
    verdict,
    write_small_model,
)
from damaged import MEMORY, OPENED, confined, serve
from moeoff.errors import MoeoffError
from moeoff.gguf.file import ModelFile
from mutants import (
    DEEP,
    GRAMMAR,
    SCHEMA,
    WORDS,
    Header,
    mutate,
    mutate_arrays,
    mutate_header,
    mutate_json,
    mutate_numbers,
    mutate_size,
    mutate_text,
    unpacks_to,
)

sys.path.insert(0, str(ROOT / "scripts" / "models"))
from companions import write_expert_adapter, write_projector

ROUTES = b"""# route_trace v1
# model=/some folder/Model.gguf arch=qwen3moe n_layer=2 n_expert=8 n_expert_used=1
# layer=0 expert_bytes=5000
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,1,0.5,1,0
0,1,1,0,0,2,0.5,0,5000
"""


class Beside(NamedTuple):
    """Files of a kind.

    Attributes:
        name: of the whole one, in the folder that `prepare` fills.
        use: makes what reads one, in the folder; the model is m.gguf there.
        share: how many are tried, of as many as are asked for.
        allowed: errors of others with which a reader may end.
        opens: the reader is given a path, and opens it.
    """

    name: str
    use: Callable[[Path], Callable[[Path, random.Random], object]]
    share: float = 1.0
    allowed: tuple[type[Exception], ...] = ()
    opens: bool = True


def prepare(folder: Path, names: set[str]) -> None:
    """A whole file of each kind; profiles take seconds, and are made if they are among the names."""
    import gguf

    from moeoff.calibrate.profile_fit import calibrate
    from moeoff.engine.prompt import PromptCache
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.sidecar.convert import convert

    model = str(folder / "m.gguf")
    write_small_model(model)
    model_index = ModelIndex.read(model)
    sidecar = convert(model, tiers="original,Q4_0", output=folder / "m.experts.gguf").path
    (folder / "text.txt").write_text((PROMPT + "\n") * 60)
    if names & {"m.profile.npz", "contract.npz"}:
        calibrate(model, text=[str(folder / "text.txt")], tokens=512, memory="2G", output=folder / "m.profile.npz", n_threads=1)
        write_contract(folder, sidecar)
    (folder / "plan.json").write_text(json.dumps({"default": "Q4_0", "layers": {"0": {"0": "Q8_0", "1": "original"}, "1": "F16"}}))
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    (folder / "grammar.gbnf").write_text(GRAMMAR)
    writer = gguf.GGUFWriter(folder / "imatrix.gguf", "imatrix")
    writer.add_string("general.type", "imatrix")
    for name, span in list(model_index.experts.items())[:4]:
        writer.add_tensor(f"{name}.in_sum2", np.ones((span.shape[2], span.shape[0]), np.float32))
        writer.add_tensor(f"{name}.counts", np.ones((span.shape[2], 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_expert_adapter(model, folder / "adapter.gguf")
    n_embd = int(model_index.hparams["embedding_length"])
    write_projector(folder / "projector.gguf", n_embd)
    writer = gguf.GGUFWriter(folder / "vector.gguf", "controlvector")
    writer.add_string("controlvector.model_hint", model_index.architecture)
    writer.add_tensor("direction.1", np.ones(n_embd, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "routes.csv.gz").write_bytes(gzip.compress(ROUTES))
    with open_model(model, **OPENED, warm=True, trace=str(folder / "run.trace")) as llm:
        answer(llm)
        PromptCache(folder / "prompt.bin").save(llm)
    shutil.copy(warm_file(), folder / "warm.npz")


def write_contract(folder: Path, sidecar: str) -> None:
    from moeoff.budget.loss_contract import Candidate, LossContract
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.sidecar.file import Sidecar
    from moeoff.sidecar.profile import Profile

    shutil.copy(folder / "m.profile.npz", folder / "contract.npz")
    candidates = [Candidate("original", 0.1, share, 0.001, 0.002, 0.001, 0.6) for share in (0.1, 0.25, 0.75)]
    candidates.append(Candidate("Q4_0", 0.0, 0.0, 0.001, 0.002, 0.001, 0.6, size=0.6))
    contract = LossContract(Sidecar(sidecar).identity, 1, 8, 4096, 512, tuple(candidates))
    Profile.write(folder / "contract.npz", ModelIndex.read(folder / "m.gguf"), {"precision": contract.to_section()})


def warm_file() -> Path:
    return next(Path(os.environ["XDG_CACHE_HOME"]).glob("moeoff/warm/*.npz"))


# each is called once in a process, and gives what reads a file


def read_sidecar(folder: Path) -> Callable[[Path, random.Random], object]:
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.sidecar.file import Sidecar

    model_index = ModelIndex.read(folder / "m.gguf")

    def read(path: Path, _rng: random.Random) -> None:
        found = Sidecar(path)
        found.check_belongs(model_index)
        for span in model_index.experts.values():
            list(found.sources(span, "original"))

    return read


def verify_sidecar(folder: Path) -> Callable[[Path, random.Random], object]:
    from moeoff.sidecar.verify import verify

    return lambda path, _rng: verify(path, model=str(folder / "m.gguf"))


def read_profile(folder: Path) -> Callable[[Path, random.Random], object]:
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.sidecar.profile import Profile

    model_index = ModelIndex.read(folder / "m.gguf")
    return lambda path, _rng: Profile.read(path, model_index, room=MEMORY // 2)


def read_plan(folder: Path) -> Callable[[Path, random.Random], object]:
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.sidecar.tiers import read_plan

    model_index = ModelIndex.read(folder / "m.gguf")
    return lambda path, _rng: read_plan(path, model_index.experts)


def read_imatrix(_folder: Path) -> Callable[[Path, random.Random], object]:
    from moeoff.gguf.imatrix import Imatrix

    return lambda path, _rng: Imatrix.read(path)


def read_trace(_folder: Path) -> Callable[[Path, random.Random], object]:
    from moeoff.trace import Trace

    return lambda path, _rng: Trace.read(path).counts()


def read_routes(_folder: Path) -> Callable[[Path, random.Random], object]:
    """In a process that has as much memory as the others may take."""
    from moeoff.memory import rss
    from moeoff.simulate import route_trace

    route_trace.available = lambda: rss() + (MEMORY - status_bytes()) // 2
    return lambda path, _rng: route_trace.read_trace(path).counts()


def opened(option: str, *strategies: str, **others: Any) -> Callable[[Path], Callable[[Path, random.Random], object]]:
    """A model is opened with the file, under one of these strategies, and answers."""

    def use(folder: Path) -> Callable[[Path, random.Random], object]:
        given = {key: str(folder / value) if key == "experts" else value for key, value in others.items()}

        def read(path: Path, rng: random.Random) -> None:
            if option == "warm":
                shutil.copy(path, warm_file())
            options = {option: True if option == "warm" else str(path), "strategy": rng.choice(strategies or ("lru",))}
            with open_model(str(folder / "m.gguf"), **OPENED | {"expert_memory": "200K"} | given | options) as llm:
                answer(llm)

        return read

    return use


def kept_open(read: Callable[[Any, Path], object]) -> Callable[[Path], Callable[[Path, random.Random], object]]:
    """A model that stays open takes the file; its next answer is the one that it gave before."""

    def use(folder: Path) -> Callable[[Path, random.Random], object]:
        llm = open_model(str(folder / "m.gguf"), **OPENED)
        expected = answer(llm)

        def check(path: Path, _rng: random.Random) -> None:
            try:
                read(llm, path)
            finally:
                if (found := answer(llm)) != expected:
                    raise AssertionError(f"the next answer is {found}, expected {expected}")

        return check

    return use


def prompt_cache(llm: Any, path: Path) -> None:
    from moeoff.engine.prompt import PromptCache

    if PromptCache(path, read_only=True).load(llm):
        for _, _token in zip(range(2), llm.generate([*llm.input_ids[: llm.n_tokens].tolist(), 1], top_k=1, temp=0.0)):
            pass


def grammar(llm: Any, path: Path) -> None:
    from llama_cpp import LlamaGrammar

    text = path.read_bytes().decode(errors="replace")
    llm.create_completion("Hi", max_tokens=4, grammar=LlamaGrammar.from_string(text, verbose=False))


def schema(llm: Any, path: Path) -> None:
    from llama_cpp import LlamaGrammar

    llm.create_completion("Hi", max_tokens=4, grammar=LlamaGrammar.from_json_schema(path.read_bytes().decode(errors="replace"), verbose=False))


def text(llm: Any, path: Path) -> None:
    from moeoff.calibrate.perplexity import read_windows

    read_windows(llm, [path], 32)


def served(option: str) -> Callable[[Path], Callable[[Path, random.Random], object]]:
    """A server starts with the file, in a child; as an option of its own, or of llama-server's."""

    def use(folder: Path) -> Callable[[Path, random.Random], object]:
        def read(path: Path, _rng: random.Random) -> None:
            options: dict[str, Any] = {"args": [option, str(path)]} if option.startswith("--") else {option: str(path)}
            child = Child(functools.partial(confined, functools.partial(serve, folder / "m.gguf", **options), folder))
            code = child.wait(DEADLINE - 10)
            if wrong := verdict(code, child.errors, peak=child.peak, memory=MEMORY, quiet=False):
                raise AssertionError(wrong)
            if code:
                raise MoeoffError(child.errors.strip().splitlines()[-1].removeprefix("Error: "))

        return read

    return use


BOUNDED = {"expert_memory": None, "memory": MEMORY}  # what unpacks to more is refused; without a bound of the process half of what is available may
_LLAMA_CPP = (Exception,)  # what llama_cpp's own readers raise is theirs
BESIDE = {
    "sidecar": Beside("m.experts.gguf", read_sidecar),
    "sidecar, verify": Beside("m.experts.gguf", verify_sidecar, 0.1),
    "sidecar, open": Beside("m.experts.gguf", opened("experts", tier="Q4_0"), 0.2),
    "profile": Beside("m.profile.npz", read_profile),
    "profile, open": Beside("m.profile.npz", opened("profile", "auto", "fate", "promoe", "edgemoe", "hobbit", "score", "lru", **BOUNDED), 0.3),
    "contract": Beside("contract.npz", opened("profile", "lru", "auto", max_loss="1%", experts="m.experts.gguf", **BOUNDED), 0.2),
    "warm state": Beside("warm.npz", opened("warm", "lru", "auto"), 0.2, opens=False),
    "prompt cache": Beside("prompt.bin", kept_open(prompt_cache)),
    "plan": Beside("plan.json", read_plan),
    "importance matrix": Beside("imatrix.gguf", read_imatrix),
    "trace": Beside("run.trace", read_trace),
    "route trace": Beside("routes.csv.gz", read_routes),
    "adapter": Beside("adapter.gguf", opened("lora_path", **BOUNDED), 0.2),
    "adapter, served": Beside("adapter.gguf", served("--lora"), 0.03),
    "control vector": Beside("vector.gguf", served("--control-vector"), 0.03),
    "projector": Beside("projector.gguf", served("mmproj"), 0.03),
    "draft": Beside("m.gguf", served("draft"), 0.03),
    "grammar": Beside("grammar.gbnf", kept_open(grammar), allowed=_LLAMA_CPP, opens=False),
    "JSON schema": Beside("schema.json", kept_open(schema), allowed=_LLAMA_CPP, opens=False),
    "text": Beside("text.txt", kept_open(text)),
}
ARRAYS_OF = {"m.profile.npz": "popularity/counts", "contract.npz": "precision/t1", "warm.npz": "residency"}


def named_beside(name: str, whole: bytes) -> list[bytes]:
    """What is not left to chance."""
    if name.endswith(".json"):
        return DEEP
    if name.endswith(".npz"):
        return [unpacks_to(whole, f"{ARRAYS_OF[name]}-more", 1 << 30)]
    if name.endswith(".csv.gz"):
        row = ROUTES.splitlines(keepends=True)[-1]
        return [gzip.compress(data, 1) for data in (ROUTES + b"1" * (400 << 20), ROUTES[:20] + b" " * (400 << 20), ROUTES[: -len(row)] + row * 2_000_000)]
    return [word.encode() for word in WORDS] if name.endswith(".gbnf") else []


def damage(path: Path, name: str, whole: bytes, header: Header | None, rng: random.Random) -> None:
    """Writes bytes that are changed, or a file that is well formed and says something else."""
    if header is not None and rng.random() < 0.2:
        mutate_size(header, rng).write(path, header.whole, whole[len(header.whole) :])
    else:
        path.write_bytes(damaged(name, whole, header, rng))


def damaged(name: str, whole: bytes, header: Header | None, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return mutate(whole, rng)
    if name.endswith(".npz"):
        return mutate_arrays(whole, rng)
    if name.endswith(".json"):
        return mutate_json(whole, rng)
    if name.endswith(".csv.gz"):
        return gzip.compress(mutate_text(gzip.decompress(whole), rng), 1)
    if header is not None:
        mutant = rng.choice((mutate_header, mutate_header, lambda *_: mutate_numbers(header, rng)))(header.whole, header.places, rng)
        return mutant.apply(whole)
    return mutate_text(whole, rng) if name.endswith((".gbnf", ".txt")) else mutate(whole, rng)


def beside_worker(folder: Path, kind: str, seed: int) -> Callable[[int], tuple[str, str]]:
    name, use, _, allowed, opens = BESIDE[kind]
    whole, path, pipe = (folder / name).read_bytes(), folder / f"bad{Path(name).suffix}", folder / "pipe"
    if not pipe.exists():
        os.mkfifo(pipe)
    header = None
    if name.endswith(".gguf"):
        with ModelFile(folder / name) as file:
            header = Header(file.header())
    named, read = named_beside(name, whole), use(folder)

    def check(n: int) -> tuple[str, str]:
        rng = case_rng(seed, n, kind)
        if n == 0 and opens:
            outcome, problem = judged(lambda: read(pipe, rng), str(pipe), allowed=allowed)
            return outcome, problem or ("" if outcome == "refused" else "a pipe was taken for a file")
        if 0 < n <= len(named):
            path.write_bytes(named[n - 1])
        else:
            damage(path, name, whole, header, rng)
        return judged(lambda: read(path, rng), str(path), allowed=allowed)

    return check


def check_beside(count: int, first: int, seed: int, only: tuple[str, ...]) -> Iterator[tuple[str, Case]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kinds = {kind: beside for kind, beside in BESIDE.items() if not only or kind in only}
        child = Child(functools.partial(prepare, folder, {beside.name for beside in kinds.values()}))
        if child.wait(10 * DEADLINE) != 0:
            raise click.ClickException(f"the whole files cannot be made: {child.errors[-2000:]}")
        for kind, beside in kinds.items():
            numbers = range(first, first + max(round(count * beside.share), 1))
            for case in in_workers(functools.partial(beside_worker, folder, kind, seed), numbers, memory=MEMORY, life=500):
                yield kind, case


@click.command()
@click.option("--count", default=2000, show_default=True, help="Files of each kind.")
@click.option("--first", default=0, show_default=True, help="Number of the first.")
@seeds_option
@click.option("--only", multiple=True, type=click.Choice(list(BESIDE)))
@json_option
def main(count: int, first: int, seeds: tuple[int, ...], only: tuple[str, ...], json_file: str | None) -> None:
    import_all()
    columns = ["what", "files", "refused in one sentence", "accepted", "problems"]
    title = "damaged files beside a model"
    with findings_by_seed(json_file, "beside", title, columns, seeds) as (tables, problems), tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        for seed, table in tables:
            problems += tell_all(table, "", check_beside(count, first, seed, only), f"--seed {seed}")


if __name__ == "__main__":
    main()
