"""Limits of the readers of files: a library's own limit decides, or none does."""

from __future__ import annotations

from tests.planted_bugs.mutants import modules
from tests.planted_bugs.mutants.places import one

_LIMITS = "tests/components/data/test_data_limits.py::"
_SIZES = "tests/components/data/test_data_file_sizes.py::"
_TAR = "tests/components/data/test_webdataset.py::"

MUTANTS = (
    one(
        22,
        "pillow_decides_how_many_pixels_are_read",
        (
            modules.PHOTOS,
            "_raise_limits",
            "max(Image.MAX_IMAGE_PIXELS, max_pixels)",
            "Image.MAX_IMAGE_PIXELS",
        ),
        f"{_LIMITS}test_max_pixels_decides_above_the_limit_of_pillow",
    ),
    one(
        22,
        "image_of_any_number_of_pixels_is_decoded",
        (modules.PHOTOS, "read", "image.width * image.height > self.max_pixels", "False"),
        f"{_LIMITS}test_max_pixels_decides_where_pillow_has_no_limit",
    ),
    one(
        22,
        "pillow_decides_how_much_text_is_read",
        (modules.PHOTOS, "_raise_limits", "MAX_TEXT_BYTES", "1 << 20"),
        f"{_LIMITS}test_photo_with_more_text_than_pillow_reads_is_read",
    ),
    one(
        22,
        "bytes_in_a_table_have_no_bound",
        (modules.PHOTOS, "read", "len(data) > MAX_BYTES", "False"),
        f"{_SIZES}test_bytes_in_a_table_have_the_same_bound",
    ),
    one(
        22,
        "decoders_decide_how_many_pixels_may_be_configured",
        (modules.DATA_CONFIG, "DataConfig", "1 << 28", "1 << 40"),
        f"{_LIMITS}test_max_pixels_is_at_most_what_every_decoder_reads",
    ),
    one(
        22,
        "pyarrow_decides_how_long_a_text_of_parquet_is",
        (modules.PARQUET_FILES, "open_parquet", "LARGEST_TEXT", "100 << 20"),
        f"{_LIMITS}test_parquet_with_more_metadata_than_pyarrow_reads_is_read",
    ),
    one(
        22,
        "pyarrow_decides_how_long_a_list_of_parquet_is",
        (modules.PARQUET_FILES, "open_parquet", "MOST_ITEMS", "1_000_000"),
        f"{_LIMITS}test_list_of_parquet_above_our_limit_is_named",
    ),
    one(
        22,
        "pyarrow_decides_how_long_a_row_of_csv_is",
        (
            modules.CSV_FILES,
            "_csv_reader",
            "2 * LARGEST_ROW if latin_1 else LARGEST_ROW",
            "1 << 20",
        ),
        f"{_LIMITS}test_row_up_to_our_limit_is_read_in_any_encoding",
    ),
    one(
        22,
        "row_of_csv_that_is_not_utf_8_stops_the_run",
        (modules.CSV_FILES, "_csv_reader", "not _is_utf_8(path)", "False"),
        f"{_LIMITS}test_row_that_is_not_utf_8_and_not_a_row_is_skipped_alone",
    ),
    one(
        22,
        "record_of_any_length_is_read",
        (modules.TFRECORD_FILES, "iter_tfrecord", "length > LARGEST_RECORD", "False"),
        f"{_LIMITS}test_record_above_our_limit_is_named_before_it_is_read",
    ),
    one(
        22,
        "json_nested_without_end_stops_the_run",
        (modules.WEBDATASET, "_parsed", "(ValueError, RecursionError)", "ValueError"),
        f"{_TAR}test_odd_members_are_counted_one_by_one_and_good_ones_are_used",
    ),
    one(
        22,
        "python_decides_how_many_digits_an_id_has",
        (modules.IDENTITY, "_number_text", "whole[2][:_MOST_DIGITS]", "whole[2]"),
        f"{_LIMITS}test_number_with_more_digits_than_python_converts_is_no_name",
    ),
    one(
        22,
        "header_of_a_tar_of_any_length_is_read",
        (modules.WEBDATASET, "_Header.frombuf", "found.size > LARGEST_HEADER", "False"),
        f"{_TAR}test_extended_header_above_our_limit_is_refused",
    ),
    one(
        22,
        "member_of_a_tar_of_any_length_is_read",
        (modules.WEBDATASET, "_members", "found.size <= MAX_BYTES", "True"),
        f"{_TAR}test_large_member_is_counted_without_being_read",
    ),
)
"""A removed limit of each reader."""
