"""llama.cpp's options: each is taken and does what it does there, or is refused with
the reason; none is without effect.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

import moeoff
from helpers.arch_models import write_model
from helpers.attention import DEMO_IN_F32, kernels
from helpers.files import ROOT
from helpers.refusals import parse_options, refusals, refused
from moeoff.budget.dry_load import default_ctx
from moeoff.budget.plan import DeviceBound
from moeoff.cli.doctor import check_cpu
from moeoff.cli.main import main
from moeoff.cli.options import help_of
from moeoff.engine.opening import plan
from moeoff.errors import OptionError
from moeoff.gguf.model_index import ModelIndex
from moeoff.llamacpp import llama as binding
from moeoff.llamacpp import native
from moeoff.llamacpp.llama import KEYWORDS, api
from moeoff.options import TABLE, Config, Sampling, ServerOptions, with_gpu, without_gpu
from moeoff.precision import Precision
from moeoff.server.arguments import arguments
from moeoff.server.sizes import PromptMemory

SMALL = {"expert_memory": "1G", "profile": False, "n_ctx": 256}


@pytest.mark.parametrize("given, code, words", refusals("Llama"))
def test_refused(demo, given, code, words):
    with refused(code, words):
        moeoff.Llama(demo, **SMALL | parse_options(given))


def test_a_cache_type_that_rows_do_not_fit_is_refused_with_llama_cpps_reason(writer, folder):
    path = write_model(writer, folder, "qwen3moe", "4-bit")
    try:
        moeoff.Llama(str(path), **SMALL, type_k="q8_0")
    except moeoff.ModelError as error:
        assert "does not divide" in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("line", TABLE.values(), ids=TABLE)
def test_a_line_of_the_table_is_all_that_an_option_needs(line):
    """From it come the option of each command that takes it, the keyword in Python,
    llama-server's argument and the documentation.
    """
    for name in line.commands:
        (param,) = [p for p in main.commands[name].params if p.name == line.name]
        assert set(param.opts) == set(line.flags) and (
            line.hidden or name == "bench" or help_of(line, None) in param.help
        ), name
    kinds = [
        kind
        for kind in (Config, Precision, Sampling, ServerOptions)
        if line.name in kind.__dataclass_fields__
    ]
    assert len(kinds) == 1 and kinds[0].__dataclass_fields__[line.name].default == line.default
    assert bool(line.flags) == bool(line.commands) and (not line.llama or line.name in KEYWORDS)
    if line.flags and not line.hidden:
        assert f"`{line.flag}`" in (ROOT / "docs" / "reference" / "options.md").read_text()
    if line.server:
        assert (
            line.server_arguments("x" if line.metavar else True)
            == [line.server, "x"][: 2 if line.metavar else 1]
        )


def test_what_was_given_reaches_llama_server(demo):
    config = Config.make(
        demo,
        type_k="q8_0",
        rope_scaling_type="yarn",
        yarn_orig_ctx="64",
        n_keep="3",
        context_shift=True,
        numa="isolate",
        n_ubatch="32",
    )
    options = ServerOptions.make(
        port="8081", cors=["https://a", "https://b"], cache_ram="64M", embedding=True
    )
    argv = " ".join(arguments(config, 512, config.keywords, options, PromptMemory(64 << 20)))
    for part in ("-c 512 ", "-ctk q8_0 ", "-fa on ", "--rope-scaling yarn ", "--yarn-orig-ctx 64 ", "--context-shift --keep 3 ", "--numa isolate ", "-ub 32 ", "-b 32 ",
                 "--port 8081 ", "--cors-origins https://a,https://b", "--cache-ram 64 ", "--embedding ", "--swa-full "):  # fmt: skip
        assert part in argv + " ", part
    assert "-ngl" not in argv and "--alias" not in argv


def test_quantized_keys_that_cannot_be_shifted(demo):
    with pytest.raises(OptionError, match="context_shift: cannot shift quantized keys of width 32"):
        plan(Config.make(demo, context_shift=True, type_k="q8_0"))


def test_llama_cpps_numbers_for_nothing_are_as_good_as_nothing_said(demo):
    """Programs that know llama_cpp.Llama pass them; people do not write them."""
    numbers = {
        "n_threads": 0,
        "rope_scaling_type": -1,
        "rope_freq_base": 0.0,
        "rope_freq_scale": 0.0,
        "yarn_orig_ctx": 0,
        "numa": False,
    }
    assert Config.make(demo, **numbers).keywords == Config.make(demo).keywords
    assert Config.make(demo, numa=0).numa is None
    for name in numbers:
        with pytest.raises(moeoff.OptionError, match=f"{name}: "):
            Config.make(demo, **{name: "0"})


def test_llama_cpps_defaults_are_not_refused(demo):
    """But that a file is mapped, which experts are not."""
    Config.make(demo, **KEYWORDS | {"use_mmap": False}).check_model(ModelIndex.read(demo))


def test_what_is_switched_off_leaves_a_strategy_its_precision(demo):
    assert (
        Config.make(demo, strategy="hobbit", mispredicted_low=False).precision
        == Config.make(demo, strategy="hobbit").precision
    )


def test_one_text_where_several_may_be_given():
    assert ServerOptions.make(cors="https://a").cors == ("https://a",)
    assert Sampling.make(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    "line",
    [line for line in TABLE.values() if line.metavar and not line.hidden],
    ids=lambda line: line.name,
)
def test_nan_is_a_value_of_nothing(line):
    """It is above no bound, and below none."""
    try:
        assert line.read("nan") in ("nan", ("nan",))  # where any text will do
    except moeoff.OptionError as error:
        assert "nan" in str(error)


@pytest.mark.parametrize(
    "given, is_on",
    [
        ({}, True),
        ({"flash_attn": "auto"}, True),
        ({"flash_attn": False}, False),
        ({"flash_attn": "off"}, False),
    ],
)
def test_flash_attention_is_on_unless_turned_off(demo, given, is_on):
    """In `Llama` and in the server, whose arguments say so: llama-server would choose
    by itself.
    """
    config = Config.make(demo, **given)
    assert config.keywords["flash_attn"] is is_on
    argv = arguments(config, 256, config.keywords, ServerOptions.make(), PromptMemory(0))
    assert argv[argv.index("-fa") + 1] == ("on" if is_on else "off")


def test_the_context_is_what_the_model_was_trained_with():
    index = SimpleNamespace(n_ctx_train=8192)
    assert [default_ctx(index, n) for n in (None, 0, 300)] == [4096, 8192, 300]
    assert default_ctx(SimpleNamespace(n_ctx_train=0), 0) == 4096


def logits(demo, **options) -> np.ndarray:
    with moeoff.Llama(demo, **{**SMALL, **options}) as llm:
        llm.decode_batch([1, 5, 9, 3, 7, 200, 11], 0, first_output=6)
        return llm.batch_logits(1).copy()


@pytest.mark.parametrize(
    "options",
    [
        {"type_k": "q4_0"},
        {"type_k": "q8_0", "type_v": "q5_1"},
        {"type_v": "iq4_nl"},
        pytest.param(
            {"attention": "f32"},
            marks=pytest.mark.skipif(not DEMO_IN_F32, reason="no kernels for this processor"),
        ),
        {"rope_freq_scale": 0.5},
        {"rope_freq_base": 5000.0},
        {"rope_scaling_type": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 32},
        {"yarn_ext_factor": 0.5, "rope_freq_scale": 0.25, "yarn_beta_slow": 2.0},
    ],
    ids=str,
)
def test_has_an_effect(demo, options):
    plain, other = logits(demo), logits(demo, **options)
    assert not np.array_equal(plain, other) and np.isfinite(other).all()


@pytest.mark.skipif(
    DEMO_IN_F32 or native.attention_kernels() != 1, reason="its heads have kernels, or none has"
)
def test_attention_in_f32_needs_one_for_the_models_heads(demo):
    with pytest.raises(OptionError, match="attention.*no such kernel for this model's heads"):
        moeoff.Llama(demo, **SMALL, attention="f32")


def test_attention_in_f32_needs_a_kernel(demo):
    with (
        kernels(False),
        pytest.raises(OptionError, match="attention.*no such kernel for this processor"),
    ):
        moeoff.Llama(demo, **SMALL, attention="f32")


def test_batches(demo):
    with moeoff.Llama(demo, **SMALL, n_batch=64, n_ubatch=16) as llm:
        assert (api.llama_n_batch(llm.ctx), api.llama_n_ubatch(llm.ctx)) == (64, 16)
    # beyond llama_cpp's own n_batch
    with moeoff.Llama(demo, **{**SMALL, "n_ctx": 1024}, n_ubatch=768) as llm:
        assert (api.llama_n_batch(llm.ctx), api.llama_n_ubatch(llm.ctx)) == (768, 768)


def test_a_tensor_is_placed(demo):
    assert np.array_equal(
        logits(demo), logits(demo, override_tensor=r"blk\.[0-3]\.attn_q=CPU,output=CPU")
    )


def test_commands_take_them(moeoff_command, invoke, demo):
    common = "-ctk q8_0 -ctv q8_0 --rope-freq-base 20000 --numa distribute -ot attn_q=CPU".split()
    run = moeoff_command(
        "run",
        "-m",
        demo,
        *"-p x -n 4 -c 256 -b 64 -ub 32 --swa-full on".split(),
        *common,
    )
    assert run.returncode == 0, run.stderr
    text = str(ROOT / "tests" / "data" / "prose.txt")
    done = moeoff_command(
        "eval",
        "-m",
        demo,
        "--text",
        text,
        *"--ctx 64 --chunks 1 --json -b 32".split(),
        *common,
    )
    assert done.returncode == 0 and json.loads(done.stdout)["perplexity"] > 1, done.stderr


# --- prompt caches ---


def test_prompts_are_kept_from_one_run_to_the_next(invoke, demo, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ask = (
        "run",
        "-m",
        demo,
        *"--raw -c 1024 -p".split(),
        "apples and pears " * 200,
        *"-n 4 --temp 0 --json".split(),
    )
    alone = json.loads(invoke(*ask).stdout)
    first, second = (json.loads(invoke(*ask, "--kv-disk", "1G").stdout) for _ in range(2))
    assert alone["text"] == first["text"] == second["text"] and second["usage"] == first["usage"]
    assert first["stats"]["prompt_tokens"] > 400 and second["stats"]["prompt_tokens"] < 10


def test_what_make_reads_may_be_numbers_too(demo):
    config = Config.make(demo, type_k=8, rope_scaling_type=2, numa=False, tensor_split=None)
    assert (config.type_k, config.rope_scaling_type) == ("q8_0", "yarn")
    assert config.keywords["type_k"] == 8
    assert config.keywords["rope_scaling_type"] == 2
    assert "numa" not in config.keywords


def test_the_models_own_yarn_factors_stay(demo):
    with moeoff.Llama(demo, **SMALL) as llm:
        params = llm.context_params
        assert (params.yarn_attn_factor, params.yarn_beta_fast, params.yarn_beta_slow) == (
            -1,
            -1,
            -1,
        )
    with moeoff.Llama(demo, **SMALL, rope_scaling_type="yarn", yarn_beta_fast=16.0) as llm:
        assert (llm.context_params.yarn_beta_fast, llm.context_params.yarn_beta_slow) == (16, -1)


def set_gpu(monkeypatch, why: str | None) -> None:
    """Set why there is no GPU. None: there is one."""
    monkeypatch.setattr("moeoff.options._no_gpu", lambda: why)


def test_a_gpu_that_is_found_is_used(monkeypatch):
    """All layers and what they leave, unless something else was said, or the run must
    repeat.
    """
    auto = DeviceBound(auto=True)

    def completed(adapters: bool = False, **values):
        with_gpu(values, adapters)
        return values

    set_gpu(monkeypatch, None)
    assert completed(n_ctx=8) == {"n_ctx": 8, "n_gpu_layers": -1, "vram": auto}
    assert completed(n_gpu_layers=3)["vram"] == auto
    assert completed(vram="2G") == {
        "vram": "2G",
        "n_gpu_layers": -1,
    }
    for unchanged in ({"n_gpu_layers": 0}, {"deterministic": True}, {"trace": "x"}):
        assert completed(**unchanged) == unchanged
    assert "vram" not in completed(vram_mode="cpu")
    assert completed(adapters=True) == {"n_gpu_layers": -1}
    set_gpu(monkeypatch, "none")
    assert completed() == {}


def test_vram_auto_without_room_is_a_remark(demo, monkeypatch):
    """llama.cpp has no device here, and computes the layers that it was to get all the
    same: as where one is too small.
    """
    set_gpu(monkeypatch, None)
    with moeoff.Llama(demo, n_gpu_layers=1, vram="auto", **SMALL) as llm:
        assert (
            llm.engine.device_remark
            == "no experts on the GPU: --vram: no layer with experts is computed on a device: give"
            " --n-gpu-layers N"
        )
        llm.eval([1, 2, 3])
        assert llm.stats().device_memory == {}
    with pytest.raises(moeoff.OptionError, match="no layer with experts is computed on a device"):
        moeoff.Llama(demo, n_gpu_layers=1, vram="1G", **SMALL)


@pytest.mark.parametrize("backend", ["CUDA", "Vulkan"])
def test_a_build_with_a_backend_and_no_driver_says_so_in_a_sentence(monkeypatch, backend):
    """And computes on the CPU; only Vulkan has a software driver to name."""
    found = {
        "llama.supports_gpu": False,
        "devices.backends": [backend],
        "devices.devices": [],
        "devices.find_devices": "the driver is too old",
    }
    for name, value in found.items():
        monkeypatch.setattr(f"moeoff.llamacpp.{name}", lambda value=value: value)
    values = {"n_gpu_layers": 99, "vram": "auto"}
    (line,) = without_gpu(values)
    reason = f"this build has {backend}, but no driver offers a device (the driver is too old)"
    assert line.startswith(f"--n-gpu-layers and --vram have no effect: {reason}") and not values
    (gpu,) = [finding for finding in check_cpu() if finding.name == "gpu"]
    assert gpu.text.startswith(reason) and gpu.text.endswith(": the CPU computes everything")
    assert all(
        ("GGML_VK_VISIBLE_DEVICES" in text) == (backend == "Vulkan") for text in (line, gpu.text)
    )
    asked = {"n_gpu_layers": 99, "vram": "1G"}
    assert without_gpu(asked) == [] and len(asked) == 2


def test_what_a_driver_lacks_is_no_reason_of_what_is_loaded(monkeypatch):
    """llama.cpp looks for devices where it first needs them, while errors of the load
    may be collected.
    """
    monkeypatch.setattr(
        binding.api,
        "llama_supports_gpu_offload",
        lambda: binding._log(binding._LOG_ERROR, b"ggml_init: it is too old\n", None),
    )
    with binding._collected_errors() as errors:
        assert binding.find_devices.__wrapped__() == "it is too old"
        binding._log(binding._LOG_ERROR, b"load: the file is damaged\n", None)
    assert errors == ["load: the file is damaged\n"]
