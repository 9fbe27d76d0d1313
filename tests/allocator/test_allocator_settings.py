"""PYTORCH_CUDA_ALLOC_CONF by torch release; the messages were read from torch itself."""

from __future__ import annotations

import pytest

from pytest_gpumem.allocator import Allocator, AllocatorSettings, SettingsError
from pytest_gpumem.allocator.messages import AllocatorError

MIB, GIB = 1 << 20, 1 << 30
Version = tuple[int, int]


@pytest.mark.parametrize("conf", ["", None, " "])
def test_no_settings_are_the_defaults(conf: str | None) -> None:
    settings = AllocatorSettings.parse(conf)

    assert settings.max_split_size is None
    assert settings.max_non_split_rounding == 20 * MIB
    assert settings.garbage_collection_threshold == 0.0
    assert settings.roundup_power2_divisions == (0,) * 16
    assert settings.large_segment_size == 20 * MIB
    assert settings.per_process_memory_fraction == 1.0
    assert not settings.expandable_segments


def test_blanks_around_keys_and_values_are_ignored() -> None:
    settings = AllocatorSettings.parse(
        "max_split_size_mb: 128, garbage_collection_threshold:0.6,"
        "roundup_power2_divisions:[256:1, 512:2, 1024:4, >:8],expandable_segments:False,"
    )

    assert settings.max_split_size == 128 * MIB
    assert settings.garbage_collection_threshold == 0.6
    assert settings.roundup_power2_divisions == (1,) * 9 + (2, 4) + (8,) * 5


@pytest.mark.parametrize(
    ("value", "slots"),
    [
        ("4", (4,) * 16),
        ("[64:8,128:4,256:2,512:1]", (8,) * 7 + (4, 2, 1) + (0,) * 6),
        ("[1:2]", (2,) + (0,) * 15),
        ("[65536:2]", (2,) * 16),
        ("[2:0,>:4]", (0, 0) + (4,) * 14),
        ("[>:4]", (0,) + (4,) * 15),
        ("[32768:2,>:4]", (2,) * 16),
        ("[1024:4,>:8,512:2]", (4,) * 9 + (2, 4) + (8,) * 5),
        ("[256:4,]", (4,) * 9 + (0,) * 7),
        ("[]", (0,) * 16),
    ],
)
def test_divisions_are_read_by_power_of_two(value: str, slots: tuple[int, ...]) -> None:
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{value}")

    assert settings.roundup_power2_divisions == slots


@pytest.mark.parametrize(
    ("value", "slots"),
    [
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2,) + (8,) * 6),
        ("[2:0,>:4]", (0,) + (4,) * 15),
        ("[>:4]", (4,) * 16),
    ],
)
def test_up_to_2_9_the_default_begins_at_the_last_slot(value: str, slots: tuple[int, ...]) -> None:
    settings = AllocatorSettings.parse(f"roundup_power2_divisions:{value}", (2, 9))

    assert settings.roundup_power2_divisions == slots


def test_large_segment_size_is_the_default_of_max_non_split_rounding() -> None:
    settings = AllocatorSettings.parse("max_split_size_mb:32,large_segment_size_mb:32")

    assert settings.large_segment_size == 32 * MIB
    assert settings.max_non_split_rounding == 32 * MIB


@pytest.mark.parametrize("version", [(2, 6), (2, 11)])
@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("max_split_size_mb:x", "stoull"),
        ("max_split_size_mb::30", "stoull"),
        (
            "max_split_size_mb 30",
            "Unrecognized key 'max_split_size_mb30' in Accelerator allocator config.",
        ),
        ("foo:1", "Unrecognized key 'foo' in Accelerator allocator config."),
        ("max_split_size_mb:30:4", "Unrecognized key '4' in Accelerator allocator config."),
        (
            "garbage_collection_threshold:1.0",
            "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
        ),
        (
            "garbage_collection_threshold:0",
            "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
        ),
        ("garbage_collection_threshold:abc", "stod"),
        (
            "garbage_collection_threshold:inf",
            "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
        ),
        (
            "garbage_collection_threshold:nan",
            "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
        ),
        (
            "pinned_num_register_threads:256",
            "Number of register threads should be less than or equal to 128, got 256",
        ),
        (
            "expandable_segments:true",
            "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got 'true'",
        ),
        (
            "pinned_use_background_threads:1",
            "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got '1'",
        ),
        ("roundup_power2_divisions:3", "For roundups, the divisions has to be power of 2 "),
        (
            "roundup_power2_divisions:[256:3]",
            "For roundups, the divisions has to be power of 2 or 0 to disable roundup ",
        ),
        ("roundup_power2_divisions:[100:2]", "For roundups, the intervals have to be power of 2 "),
        ("backend:foo", "Unknown allocator backend, options are native and cudaMallocAsync"),
        ("pinned_num_register_threads:3", "Number of register threads has to be power of 2, got 3"),
    ],
)
def test_invalid_settings_raise_2_11s_messages(conf: str, message: str, version: Version) -> None:
    with pytest.raises(SettingsError) as error:
        AllocatorSettings.parse(conf, version)
    assert str(error.value) == message


@pytest.mark.parametrize("key", ["max_split_size_mb", "max_non_split_rounding_mb"])
@pytest.mark.parametrize(("version", "least"), [((2, 6), 21), ((2, 11), 20)])
def test_a_size_below_the_minimum_is_refused(key: str, version: Version, least: int) -> None:
    AllocatorSettings.parse(f"{key}:{least}", version)
    with pytest.raises(SettingsError, match=f"option {key} too small, must be >= {least}"):
        AllocatorSettings.parse(f"{key}:{least - 1}", version)


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        (
            "large_segment_size_mb:10",
            "CachingAllocator option large_segment_size_mb must be > 10 MB",
        ),
        (
            "large_segment_size_mb:32,max_split_size_mb:31",
            "CachingAllocator option max_split_size_mb too small, must be >= 32",
        ),
        (
            "per_process_memory_fraction:1.5",
            "per_process_memory_fraction is invalid, set it in [0.0, 1.0]",
        ),
        (
            "pinned_reserve_segment_size_mb:0",
            "Pinned reserve segment size has to be greater than 0",
        ),
        (
            "max_split_size_mb:-5",
            "CachingAllocator option max_split_size_mb too small, must be >= 20",
        ),
    ],
)
def test_invalid_values_of_newer_keys_are_refused(conf: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        AllocatorSettings.parse(conf, (2, 13))
    assert str(error.value) == message


@pytest.mark.parametrize("version", [(2, 6), (2, 13)])
@pytest.mark.parametrize(
    "conf", ["max_split_size_mb", "roundup_power2_divisions:[256:1", "max_split_size_mb:"]
)
def test_incomplete_settings_are_rejected(conf: str, version: Version) -> None:
    with pytest.raises(SettingsError):
        AllocatorSettings.parse(conf, version)


@pytest.mark.parametrize(
    ("conf", "since"),
    [
        ("graph_capture_record_stream_reuse:True", (2, 9)),
        ("pinned_reserve_segment_size_mb:4", (2, 10)),
        ("per_process_memory_fraction:0.5", (2, 10)),
        ("large_segment_size_mb:11", (2, 11)),
        ("throw_on_cudamalloc_oom:True", (2, 12)),
        ("pinned_free_catch_all:True", (2, 12)),
        ("pinned_max_round_threshold_mb:4", (2, 13)),
        ("pinned_max_cached_size_mb:4", (2, 13)),
        ("expandable_segments_reserve:40G", (2, 15)),
        ("expandable_segments_reserve_by_class:[default:0.5,other:1G]", (2, 15)),
    ],
)
def test_a_key_is_unknown_before_its_release(conf: str, since: Version) -> None:
    AllocatorSettings.parse(conf, since)

    with pytest.raises(SettingsError, match="Unrecognized"):
        AllocatorSettings.parse(conf, (since[0], since[1] - 1))


@pytest.mark.parametrize(("version", "accepted"), [((2, 9), False), ((2, 10), True)])
def test_20_mib_is_a_split_size_since_2_10(version: Version, accepted: bool) -> None:
    try:
        settings = AllocatorSettings.parse("max_split_size_mb:20", version)
    except SettingsError:
        assert not accepted
    else:
        assert accepted
        assert settings.max_split_size == 20 * MIB


@pytest.mark.parametrize("version", [(2, 5), (2, 16), (3, 0)])
def test_unknown_releases_are_refused(version: Version) -> None:
    with pytest.raises(SettingsError, match=r"not known to the simulated allocator.*2\.6 to 2\.15"):
        AllocatorSettings.parse("", version)


def test_another_backend_is_refused_and_not_ignored() -> None:
    with pytest.raises(AllocatorError) as error:
        Allocator(1 << 30, AllocatorSettings.parse("backend:cudaMallocAsync", (2, 15)), (2, 15))
    assert str(error.value) == ("backend:cudaMallocAsync is not simulated; use backend:native.")


@pytest.mark.parametrize(
    ("text", "reserved"),
    [
        ("40G", 40 * GIB),
        ("0.5", 50 * GIB),
        ("1.125", 100 * GIB + 100 * GIB // 8),
        # More than the default makes no sense: no allocation can be larger than the device.
        ("200G", 100 * GIB + 100 * GIB // 8),
        ("1e20G", 100 * GIB + 100 * GIB // 8),
    ],
)
def test_addresses_of_an_expandable_segment_are_a_fraction_or_gibibytes(
    text: str, reserved: int
) -> None:
    settings = AllocatorSettings.parse(f"expandable_segments_reserve:{text}", (2, 15))

    assert settings.address_space(100 * GIB) == reserved


@pytest.mark.parametrize("text", ["abc", "0", "-1", "inf", "1GB"])
def test_a_bad_reserve_is_ignored_with_torchs_warning(text: str) -> None:
    with pytest.warns(UserWarning, match=f"Ignoring invalid .* reserve value '{text}'"):
        settings = AllocatorSettings.parse(f"expandable_segments_reserve:{text}", (2, 15))

    assert settings.expandable_segments_reserve is None


def test_reserves_by_class_are_read_and_change_nothing_without_classes() -> None:
    conf = "expandable_segments_reserve_by_class:[serving:0.25,sparse:8G],expandable_segments:True"

    settings = AllocatorSettings.parse(conf, (2, 15))

    assert settings.expandable_segments
    assert settings.address_space(8 * GIB) == 9 * GIB


class TestReadAgain:
    """Settings that are read again while the process runs (``setAllocatorSettings``)."""

    def again(
        self, first: str, second: str, version: tuple[int, int] = (2, 13)
    ) -> AllocatorSettings:
        return AllocatorSettings.parse(second, version, AllocatorSettings.parse(first, version))

    def test_keys_that_torch_resets_return_to_their_defaults(self) -> None:
        first = (
            "max_split_size_mb:64,roundup_power2_divisions:4,garbage_collection_threshold:0.5,"
            "max_non_split_rounding_mb:100"
        )

        settings = self.again(first, "")

        assert settings.max_split_size is None
        assert settings.roundup_power2_divisions == (0,) * 16
        assert settings.garbage_collection_threshold == 0.0
        assert settings.max_non_split_rounding == 20 * MIB
        assert settings.conf == ""

    def test_keys_that_torch_does_not_reset_keep_their_values(self) -> None:
        first = "expandable_segments:True,large_segment_size_mb:32,per_process_memory_fraction:0.5"

        settings = self.again(first, "max_split_size_mb:40")

        assert settings.expandable_segments
        assert settings.large_segment_size == settings.max_non_split_rounding == 32 * MIB
        assert settings.per_process_memory_fraction == 0.5
        assert settings.max_split_size == 40 * MIB

    def test_up_to_2_9_max_non_split_rounding_keeps_its_value(self) -> None:
        settings = self.again("max_non_split_rounding_mb:100", "", (2, 9))

        assert settings.max_non_split_rounding == 100 * MIB

    def test_keys_before_an_invalid_key_are_applied(self) -> None:
        with pytest.raises(SettingsError, match="too small, must be >= 32") as error:
            self.again("", "large_segment_size_mb:32,max_split_size_mb:31")

        assert error.value.settings is not None
        assert error.value.settings.large_segment_size == 32 * MIB

    def test_the_backend_cannot_change(self) -> None:
        with pytest.raises(SettingsError, match="parsed at load time, cudaMallocAsync != native"):
            self.again("", "backend:cudaMallocAsync")


@pytest.mark.parametrize(
    "conf", ["release_lock_on_cudamalloc:True", "pinned_use_cuda_host_register:True"]
)
def test_settings_that_change_no_size_are_accepted(conf: str) -> None:
    Allocator(1 << 30, AllocatorSettings.parse(conf))


def test_host_settings_are_kept_for_the_snapshot() -> None:
    settings = AllocatorSettings.parse("pinned_num_register_threads:8,pinned_max_cached_size_mb:4")

    assert settings.pinned_num_register_threads == 8
    assert settings.pinned_max_cached_size == 4 * MIB


def test_per_process_memory_fraction_sets_the_limit() -> None:
    settings = AllocatorSettings.parse("per_process_memory_fraction:0.5")
    allocator = Allocator(1 << 30, settings)

    with pytest.raises(RuntimeError, match=r"512\.00 MiB allowed"):
        allocator.malloc(600 * MIB)
