from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from pytest_gpumem.option_values import DEFAULT_GPU, DeviceChoice, ReportTarget, device_choice
from pytest_gpumem.options import Settings, add_options, settings_from
from pytest_gpumem.simulated.gpu.catalogue import find_gpu
from pytest_gpumem.sizes import Tolerance

pytest_plugins = ("pytester",)

Configure = Callable[..., pytest.Config]
Read = Callable[..., Settings]


class OptionsOnly:
    """A pytest plugin that only adds the options."""

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        add_options(parser)


@pytest.fixture
def configure(
    pytester: pytest.Pytester,
    remembered_distributions: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Configure:
    for name in ("CI", "GITHUB_ACTIONS", "GITLAB_CI"):
        monkeypatch.delenv(name, raising=False)
    # The device that auto selects depends on the machine and on how these tests were started.
    monkeypatch.setattr("pytest_gpumem.device.host_gpus.why_not", lambda baselines: _NO_CUDA)

    def configured(*args: str, ini: str = "") -> pytest.Config:
        pytester.plugins = [OptionsOnly()]
        pytester.makeini("[pytest]\n" + dedent(ini))
        return pytester.parseconfig("-p", "no:gpumem", *args)

    return configured


@pytest.fixture
def read(configure: Configure) -> Read:
    def settings(*args: str, ini: str = "") -> Settings:
        return settings_from(configure(*args, ini=ini))

    return settings


_NO_CUDA = "there is no CUDA build of torch"


def refusal(read: Read, *args: str, ini: str = "") -> str:
    with pytest.raises(pytest.UsageError) as error:
        read(*args, ini=ini)
    return str(error.value)


def test_settings_without_options_are_the_defaults(read: Read, pytester: pytest.Pytester) -> None:
    assert read() == Settings(
        device=DeviceChoice("auto", models=("A100-40GB",)),
        sim_scope="test",
        sim_values="auto",
        sim_values_limit=30.0,
        all=False,
        baselines=pytester.path / "baselines",
        update_baselines=None,
        prune_baselines=False,
        require_baselines=False,
        tolerance=None,
        reports=(),
        history=None,
        explain="failed",
        artifacts=None,
        defaults={},
    )


@pytest.mark.parametrize("value", ["auto", "off"])
def test_stand_ins_are_on_or_off(read: Read, value: str) -> None:
    assert read(f"--gpumem-sim-stand-ins={value}").sim_stand_ins == value
    assert read(ini=f"gpumem_sim_stand_ins = {value}").sim_stand_ins == value


def test_stand_ins_are_not_chosen_by_name(read: Read) -> None:
    assert refusal(read, "--gpumem-sim-stand-ins=flash-attn").startswith(
        "--gpumem-sim-stand-ins='flash-attn' is not accepted; write auto or off"
    )


def test_the_default_gpu_is_in_the_catalogue() -> None:
    assert find_gpu(DEFAULT_GPU).name == DEFAULT_GPU == "A100-40GB"


@pytest.mark.parametrize(
    ("value", "device"),
    [
        ("auto", DeviceChoice("auto", models=("A100-40GB",))),
        ("cuda", DeviceChoice("cuda")),
        ("cuda:1", DeviceChoice("cuda", index=1)),
        ("sim", DeviceChoice("sim", models=("A100-40GB",))),
        ("sim:t4", DeviceChoice("sim", models=("T4",))),
        ("sim:T4, H100", DeviceChoice("sim", models=("T4", "H100"))),
        ("sim:a100-80gb*2,T4", DeviceChoice("sim", models=("A100-80GB*2", "T4"))),
        ("off", DeviceChoice("off")),
    ],
)
def test_a_device_is_parsed(read: Read, value: str, device: DeviceChoice) -> None:
    assert read(f"--gpumem-device={value}").device == device
    assert read(ini=f"gpumem_device = {value}").device == device


def test_the_dry_device_takes_every_model_of_the_catalogue() -> None:
    # Without pytest, which would load the dry device.
    assert device_choice("dry") == DeviceChoice("dry", models=("A100-40GB",))
    assert device_choice("dry:h100*2") == DeviceChoice("dry", models=("H100*2",))


@pytest.mark.parametrize("value", ["gpu", "cuda:", "dry:", "cuda:x", "sim:", "", "auto:1"])
def test_a_bad_device_is_refused(read: Read, value: str) -> None:
    assert refusal(read, f"--gpumem-device={value}") == (
        f"--gpumem-device={value!r} is not a device; "
        "write auto|cuda|cuda:N|dry|dry:MODEL[*N][,MODEL...]|sim|sim:MODEL[*N][,MODEL...]|off"
    )


def test_an_unknown_model_gets_a_suggestion(read: Read) -> None:
    assert refusal(read, ini="gpumem_device = sim:A100").startswith(
        "gpumem_device='sim:A100': 'A100' is not a GPU model; "
        "did you mean A100-40GB or A100-80GB? known: "
    )


@pytest.mark.parametrize("value", ["0", "-1", "nan", "soon"])
def test_a_time_limit_that_is_not_a_duration_is_refused(read: Read, value: str) -> None:
    with pytest.raises(
        pytest.UsageError, match=f"--gpumem-sim-values-limit='{value}' is not a tim"
    ):
        read(f"--gpumem-sim-values-limit={value}")


def test_a_second_run_may_have_no_time_limit(read: Read) -> None:
    assert read("--gpumem-sim-values-limit=inf").sim_values_limit == math.inf


def test_every_option_has_an_ini_twin(read: Read, pytester: pytest.Pytester) -> None:
    settings = read(
        ini="""
        gpumem_device = cuda:2
        gpumem_sim_scope = session
        gpumem_sim_values = always
        gpumem_sim_values_limit = 2.5
        gpumem_all = true
        gpumem_baselines = stored
        gpumem_update_baselines = new
        gpumem_prune_baselines = yes
        gpumem_require_baselines = on
        gpumem_tolerance = 1% + 1MiB
        gpumem_report =
            json:one.json
            json:two.json
        gpumem_history = all
        gpumem_explain = always
        gpumem_artifacts = kept
        """
    )
    assert settings == Settings(
        device=DeviceChoice("cuda", index=2),
        sim_scope="session",
        sim_values="always",
        sim_values_limit=2.5,
        all=True,
        baselines=pytester.path / "stored",
        update_baselines="new",
        prune_baselines=True,
        require_baselines=True,
        tolerance=Tolerance(1.0, 1_048_576),
        reports=(
            ReportTarget("json", pytester.path / "one.json"),
            ReportTarget("json", pytester.path / "two.json"),
        ),
        history="all",
        explain="always",
        artifacts=pytester.path / "kept",
        defaults={"tolerance": Tolerance(1.0, 1_048_576)},
    )


def test_a_shard_and_its_file_of_weights_are_parsed(read: Read, pytester: pytest.Pytester) -> None:
    settings = read(ini="gpumem_shard = 2/4\ngpumem_shard_by = took.json")
    assert (settings.shard, settings.shard_by) == ((2, 4), pytester.path / "took.json")
    assert read("--gpumem-shard=1/1", ini="gpumem_shard = 2/4").shard == (1, 1)


@pytest.mark.parametrize("value", ["0/2", "3/2", "1", "1/0", "-1/2", "a/b", "", "1/2/3"])
def test_a_malformed_shard_is_refused(read: Read, value: str) -> None:
    assert refusal(read, f"--gpumem-shard={value}") == (
        f"--gpumem-shard='{value}' is not a shard; write K/N with K from 1 to N, like 2/4"
    )


def test_the_command_line_wins_over_the_ini_file(read: Read, pytester: pytest.Pytester) -> None:
    settings = read(
        "--gpumem-device=off",
        "--gpumem-sim-scope=test",
        "--gpumem-sim-values=never",
        "--gpumem-sim-values-limit=60",
        "--gpumem-all",
        "--gpumem-baselines=there",
        "--gpumem-update-baselines=all",
        "--gpumem-prune-baselines",
        "--gpumem-require-baselines",
        "--gpumem-tolerance=0",
        "--gpumem-report=json:a.json",
        "--gpumem-report=json:b.json",
        "--gpumem-history=python",
        "--gpumem-explain=never",
        "--gpumem-artifacts=elsewhere",
        ini="""
        gpumem_device = cuda
        gpumem_sim_scope = session
        gpumem_sim_values = always
        gpumem_sim_values_limit = 2.5
        gpumem_all = false
        gpumem_baselines = stored
        gpumem_update_baselines = new
        gpumem_prune_baselines = false
        gpumem_require_baselines = false
        gpumem_tolerance = 5%
        gpumem_report = json:ini.json
        gpumem_history = all
        gpumem_explain = always
        gpumem_artifacts = kept
        """,
    )
    assert settings == Settings(
        device=DeviceChoice("off"),
        sim_scope="test",
        sim_values="never",
        sim_values_limit=60.0,
        all=True,
        baselines=pytester.path / "there",
        update_baselines="all",
        prune_baselines=True,
        require_baselines=True,
        tolerance=Tolerance(0.0, 0),
        reports=(
            ReportTarget("json", pytester.path / "a.json"),
            ReportTarget("json", pytester.path / "b.json"),
        ),
        history="python",
        explain="never",
        artifacts=pytester.path / "elsewhere",
        defaults={"tolerance": Tolerance(0.0, 0)},
    )


@pytest.mark.parametrize(
    ("option", "attribute", "bare", "other"),
    [
        ("--gpumem-update-baselines", "update_baselines", "all", "new"),
        ("--gpumem-history", "history", "python", "all"),
    ],
)
class TestAFlagWithAnOptionalValue:
    PATH = "tests/test_model.py::test_step"

    @pytest.fixture(autouse=True)
    def project(self, pytester: pytest.Pytester) -> None:
        tests = pytester.mkdir("tests")
        (tests / "test_model.py").write_text("def test_step(): pass\n")

    def test_a_bare_flag_leaves_the_path_that_follows(
        self, configure: Configure, option: str, attribute: str, bare: str, other: str
    ) -> None:
        config = configure(option, self.PATH)
        assert config.args == [self.PATH]
        assert getattr(settings_from(config), attribute) == bare

    def test_a_bare_flag_at_the_end(
        self, configure: Configure, option: str, attribute: str, bare: str, other: str
    ) -> None:
        config = configure(self.PATH, option)
        assert config.args == [self.PATH]
        assert getattr(settings_from(config), attribute) == bare

    def test_a_bare_flag_does_not_take_a_path_that_is_named_like_a_value(
        self,
        configure: Configure,
        pytester: pytest.Pytester,
        option: str,
        attribute: str,
        bare: str,
        other: str,
    ) -> None:
        pytester.mkdir(other)
        config = configure(option, other)
        assert config.args == [other]
        assert getattr(settings_from(config), attribute) == bare

    def test_a_value_after_an_equals_sign_is_read(
        self, configure: Configure, option: str, attribute: str, bare: str, other: str
    ) -> None:
        for value in (bare, other):
            config = configure(f"{option}={value}", self.PATH)
            assert config.args == [self.PATH]
            assert getattr(settings_from(config), attribute) == value

    def test_the_last_of_two_values_counts(
        self, read: Read, option: str, attribute: str, bare: str, other: str
    ) -> None:
        assert getattr(read(option, f"{option}={other}"), attribute) == other
        assert getattr(read(f"{option}={other}", option), attribute) == bare

    def test_any_other_value_is_refused(
        self, configure: Configure, option: str, attribute: str, bare: str, other: str
    ) -> None:
        with pytest.raises(pytest.UsageError) as error:
            configure(f"{option}=some")
        sentence = str(error.value)
        assert f"{option}/{option}={bare}/{option}={other}: " in sentence
        assert "'some'" in sentence

    def test_any_other_ini_value_is_refused(
        self, read: Read, option: str, attribute: str, bare: str, other: str
    ) -> None:
        key = option[2:].replace("-", "_")
        sentence = refusal(read, ini=f"{key} = some")
        assert sentence.startswith(f"{key}='some' is not accepted; write ")
        assert bare in sentence
        assert other in sentence


@pytest.mark.parametrize("flag", ["all", "prune_baselines", "require_baselines"])
@pytest.mark.parametrize(
    ("written", "value"),
    [
        *(("true", True), ("1", True), ("yes", True), ("on", True), ("True", True)),
        *(("false", False), ("0", False), ("no", False), ("off", False)),
    ],
)
def test_booleans_of_the_ini_file(read: Read, flag: str, written: str, value: bool) -> None:
    assert getattr(read(ini=f"gpumem_{flag} = {written}"), flag) is value


@pytest.mark.parametrize(
    "key", ["gpumem_all", "gpumem_prune_baselines", "gpumem_require_baselines", "gpumem_baseline"]
)
def test_a_bad_boolean_is_refused(read: Read, key: str) -> None:
    assert refusal(read, ini=f"{key} = maybe") == (
        f"{key}: invalid truth value 'maybe'; write true or false"
    )


def test_baselines_are_required_where_ci_is_set(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    assert settings_from(configure()).require_baselines is True
    explicit = configure(ini="gpumem_require_baselines = false")
    assert settings_from(explicit).require_baselines is False
    monkeypatch.setenv("CI", "")
    assert settings_from(configure()).require_baselines is False


def test_a_sim_scope_other_than_test_or_session_is_refused(read: Read) -> None:
    assert refusal(read, "--gpumem-sim-scope=module") == (
        "--gpumem-sim-scope='module' is not accepted; write test or session"
    )


def test_a_bad_tolerance_is_refused(read: Read) -> None:
    form = 'is not a tolerance; write "2% + 1MiB", "1%", "1MiB" or bytes as an int'
    assert refusal(read, "--gpumem-tolerance=a bit") == f"--gpumem-tolerance='a bit' {form}"
    assert refusal(read, ini="gpumem_tolerance = a bit") == f"gpumem_tolerance='a bit' {form}"


REPORTS = "json:PATH or html:PATH or markdown:PATH or github"


@pytest.mark.parametrize("value", ["out.json", "json:", "json", "xml:out.xml", "github:x", "OFF"])
def test_a_bad_report_is_refused(read: Read, value: str) -> None:
    assert refusal(read, f"--gpumem-report={value}") == (
        f"--gpumem-report={value!r} is not a report; {REPORTS} is accepted, or off"
    )
    assert refusal(read, ini=f"gpumem_report = {value}") == (
        f"gpumem_report={value!r} is not a report; {REPORTS} is accepted, or off"
    )


def test_a_ci_system_gets_its_report_unless_reports_are_off(
    read: Read, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert read().reports == ()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert read().reports == (ReportTarget("github", None, unasked=True),)
    assert read("--gpumem-report=github").reports == (ReportTarget("github", None),)
    assert read("--gpumem-report=off").reports == ()
    assert read("--gpumem-report=json:/a", "--gpumem-report=off").reports == (
        ReportTarget("json", Path("/a")),
    )
    assert read(ini="gpumem_report = off").reports == ()
    monkeypatch.delenv("GITHUB_ACTIONS")
    monkeypatch.setenv("GITLAB_CI", "true")
    monkeypatch.setenv("CI_PROJECT_DIR", str(tmp_path))
    assert read().reports == (ReportTarget("markdown", tmp_path / "gpumem.md", unasked=True),)
    assert read("--gpumem-report=markdown:/b").reports == (ReportTarget("markdown", Path("/b")),)
    assert read("--gpumem-report=off").reports == ()


def test_relative_paths_start_at_the_folder_of_option_or_ini_file(
    configure: Configure, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = pytester.mkdir("below")
    monkeypatch.chdir(below)
    written = configure("--gpumem-baselines=b", "--gpumem-report=json:r.json")
    settings = settings_from(written)
    assert settings.baselines == below / "b"
    assert settings.reports == (ReportTarget("json", below / "r.json"),)
    settings = settings_from(configure(ini="gpumem_baselines = b\ngpumem_artifacts = a"))
    assert settings.baselines == pytester.path / "b"
    assert settings.artifacts == pytester.path / "a"
    assert settings_from(configure()).baselines == pytester.path / "baselines"


def test_absolute_paths_are_kept(read: Read, tmp_path: Path) -> None:
    assert read(f"--gpumem-artifacts={tmp_path}").artifacts == tmp_path


def test_an_empty_path_is_refused(read: Read) -> None:
    assert refusal(read, "--gpumem-baselines=") == (
        "--gpumem-baselines='' is not a folder; write its path"
    )


def test_defaults_of_the_marker_are_read_from_the_ini_file(read: Read) -> None:
    settings = read(
        ini="""
        gpumem_max = 2GB
        gpumem_max_reserved = 3GiB
        gpumem_max_leak = 0
        gpumem_phases =
            forward = 1GB
            my phase = 512
        gpumem_baseline = true
        gpumem_predict = 1%
        gpumem_tolerance = 2%
        gpumem_warmup = 1
        gpumem_repeat = 2
        gpumem_gpu = t4, H100
        gpumem_min_memory = 20GiB
        """
    )
    assert settings.defaults == {
        "max": 2_000_000_000,
        "max_reserved": 3_221_225_472,
        "max_leak": 0,
        "phases": {"forward": 1_000_000_000, "my phase": 512},
        "baseline": True,
        "predict": Tolerance(1.0, 0),
        "tolerance": Tolerance(2.0, 0),
        "warmup": 1,
        "repeat": 2,
        "gpu": ("T4", "H100"),
        "min_memory": 21_474_836_480,
    }


def test_an_empty_ini_value_counts_as_unset(read: Read) -> None:
    settings = read(ini="gpumem_max =\ngpumem_phases =\ngpumem_device =\n")
    assert settings.defaults == {}
    assert settings.device.kind == "auto"


@pytest.mark.parametrize(
    ("ini", "sentence"),
    [
        ("gpumem_max = 2 gigs", "gpumem_max='2 gigs' is not a size; write bytes"),
        ("gpumem_max_leak = -1", "gpumem_max_leak='-1' is not a size; write bytes"),
        ("gpumem_warmup = x", "gpumem_warmup='x' is not a number of runs; write an int from 0 up"),
        ("gpumem_repeat = 0", "gpumem_repeat=0 is not a number of runs; write an int from 1 up"),
        ("gpumem_gpu = T4,,", "gpumem_gpu='' is not a GPU model; known: T4, "),
        ("gpumem_phases = forward", "gpumem_phases='forward' is not a phase and its limit, each "),
        ("gpumem_phases = a=1\n  a=2", "gpumem_phases='a=2' is not a phase and its limit, each "),
        ("gpumem_phases = a=x", "gpumem_phases={'a': 'x'}: for 'a', 'x' is not a size; "),
    ],
)
def test_a_bad_default_of_the_marker_is_refused(read: Read, ini: str, sentence: str) -> None:
    assert refusal(read, ini=ini).startswith(sentence)


needs_native_toml = pytest.mark.skipif(
    pytest.version_tuple < (9,), reason="[tool.pytest] with typed values came with pytest 9"
)


@needs_native_toml
def test_booleans_and_lists_of_a_toml_file_are_parsed(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml(
        "[tool.pytest]\ngpumem_all = true\ngpumem_phases = ['forward = 1GB']\n"
    )
    pytester.plugins = [OptionsOnly()]
    settings = settings_from(pytester.parseconfig("-p", "no:gpumem"))
    assert settings.all is True
    assert settings.defaults == {"phases": {"forward": 1_000_000_000}}


@needs_native_toml
def test_a_toml_value_of_another_type_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyprojecttoml("[tool.pytest]\ngpumem_warmup = 1\n")
    pytester.plugins = [OptionsOnly()]
    with pytest.raises(pytest.UsageError, match="'gpumem_warmup' expects a string, got int: 1"):
        settings_from(pytester.parseconfig("-p", "no:gpumem"))


def test_help_shows_every_option_and_its_ini_twin(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    pytester.makepyfile(
        options_only="from pytest_gpumem.options import add_options as pytest_addoption"
    )
    pytester.syspathinsert()
    result = pytester.runpytest_inprocess(
        *("-p", "no:gpumem", "-p", "no:asyncio", "-p", "options_only", "--help")
    )
    group = result.stdout.str().partition("GPU memory (pytest-gpumem):")[2]
    options, _, ini = group.partition("\n[pytest] ")
    for option in (
        *("--gpumem-device", "--gpumem-sim-scope", "--gpumem-all", "--gpumem-baselines"),
        *("--gpumem-update-baselines", "--gpumem-prune-baselines", "--gpumem-require-baselines"),
        *("--gpumem-tolerance", "--gpumem-report", "--gpumem-history", "--gpumem-artifacts"),
        "--gpumem-sim-values",
        "--gpumem-sim-stand-ins",
        "--gpumem-sim-compile",
    ):
        assert f"  {option}" in options
        assert f"  {option[2:].replace('-', '_')} (" in ini
    for text in (options, ini):
        assert 'how far a baseline may be exceeded, like "1% + 1MiB"' in " ".join(text.split())
