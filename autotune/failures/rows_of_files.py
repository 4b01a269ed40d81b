"""Failures of what is read, and of what a class of exceptions is called. Part of the table of failures, read behind the checks.

A file that is not there, a picture that is cut and an example that lacks a part fail in the middle of some statement, with words
that say nothing by themselves. Where it happened does, and what the file is called.
"""

from __future__ import annotations

from autotune.failures.rows_of_checks import FROM_FRAMEWORKS, READS_DATA
from autotune.failures.table import Row

_MISSING = r"\A(?:FileNotFoundError|OSError)\b.{0,80}(?:No such file or directory|does not exist|cannot find the path)"
_WRITES = r"""(?!.*(?:["'][wax]b?\+?["']|\bsave|\bdump|\bwrite|mkdir|\brename|\breplace\(|remove\(|unlink))"""

ROWS_OF_FILES: tuple[Row, ...] = (
    Row(
        # A bare assertion says nothing, and the statement that it stands in does.
        name="settings_asserted",
        pattern=r"\A(?:[\w.]+\.)?AssertionError:?\s*\Z",
        places=rf"{FROM_FRAMEWORKS}\S* (?-i:assert) .*\b(?:args|cfg|config|hparams|\w+_(?:args|config)"
        r"|\w*(?:batch|world)_size)\b",
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        # How many at once, or how many before a step: nothing else is divided by where training is prepared.
        name="divided_by_nothing",
        pattern=r"\AZeroDivisionError\b",
        places=rf"{FROM_FRAMEWORKS}\S*:\w+ .*(?://|%|/) *\(?\s*[\w.]*(?:steps?|size|num_\w+|count|accum\w*)\b",
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        # The first example is asked for, and there is none.
        name="data_none_at_all",
        pattern=r"\AStopIteration\b",
        places=rf"{FROM_FRAMEWORKS}\S* .*\bnext\(iter\(",
        innermost=2,
        kind="other",
        cause="data",
    ),
    Row(
        name="data_within",
        pattern=r"\A(?:KeyError|IndexError|TypeError|ValueError|AttributeError)\b",
        places=rf"(?={FROM_FRAMEWORKS})(?!\S*/torch/)\S*(?:{READS_DATA})",
        innermost=2,
        kind="other",
        cause="data",
    ),
    Row(
        # What libraries and trainers that read pictures, sound and films raise says that they can't be read.
        name="media_unreadable",
        pattern=r"\A(?!(?:[\w.]+\.)?(?:ImportError|ModuleNotFoundError|KeyboardInterrupt|SystemExit)\b)\w",
        places=r"(?:site|dist)-packages/(?:PIL|qwen_vl_utils|qwen_omni_utils|decord|av|torchcodec|librosa|soundfile|webdataset)/"
        r"\S*:(?!<module>)",
        innermost=2,
        kind="other",
        cause="data",
    ),
    Row(
        name="program_missing",
        pattern=_MISSING,
        places=r"/subprocess\.py:_execute_child\b",
        innermost=1,
        kind="other",
        cause="version",
    ),
    Row(
        name="settings_file_missing",
        pattern=rf"{_MISSING}.{{0,400}}?(?:\.(?:ya?ml|toml|ini|cfg|jinja2?|py)|(?:config|zero|ds|fsdp)[\w.-]*\.json)\b",
        places=rf"\A{_WRITES}",
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="file_missing",
        pattern=_MISSING,
        places=rf"\A{_WRITES}",
        innermost=1,
        kind="other",
        cause="data",
    ),
    # Whoever made a class of exceptions says by its name what it is for.
    Row(
        name="named_settings",
        pattern=r"\A(?:[\w.]+\.)?(?-i:\w*(?:Config|Configuration|Usage|Argument|Option|Setting|Validation|Override"
        r"|Interpolation|GrammarParse|Instantiation)\w*(?:Error|Exception))\b",
        places=r"\A",
        innermost=1,
        kind="illegal",
        cause="illegal_config",
    ),
    Row(
        name="named_data",
        pattern=r"\A(?:[\w.]+\.)?(?-i:\w*(?:Dataset|Schema|Corrupt|Malformed|BadData|DataFormat|DataLoad)\w*(?:Error|Exception))\b",
        places=r"\A",
        innermost=1,
        kind="other",
        cause="data",
    ),
)
