"""Tuning tables: model, files, packed form, in-graph lookup and converters."""

from __future__ import annotations

from trtllm_tokenweave.table.edit import RowChange, TableDiff, diff_tables, merge_tables
from trtllm_tokenweave.table.files import load_table, parse_table, save_table
from trtllm_tokenweave.table.launch import Fabric, LaunchConfig
from trtllm_tokenweave.table.model import (
    ANY_GPU,
    SCHEMA_VERSION,
    Bucket,
    MeasuredOn,
    TableKey,
    TableRow,
    TableSource,
    TuningTable,
    default_table,
)
from trtllm_tokenweave.table.packing import pack_table, unpack_table
from trtllm_tokenweave.table.paper import PaperTarget, convert_paper_config, load_paper_config
from trtllm_tokenweave.table.prefix import PrefixLookup, prefix_lookup

__all__ = [
    "ANY_GPU",
    "SCHEMA_VERSION",
    "Bucket",
    "Fabric",
    "LaunchConfig",
    "MeasuredOn",
    "PaperTarget",
    "PrefixLookup",
    "RowChange",
    "TableDiff",
    "TableKey",
    "TableRow",
    "TableSource",
    "TuningTable",
    "convert_paper_config",
    "default_table",
    "diff_tables",
    "load_paper_config",
    "load_table",
    "merge_tables",
    "pack_table",
    "parse_table",
    "prefix_lookup",
    "save_table",
    "unpack_table",
]
