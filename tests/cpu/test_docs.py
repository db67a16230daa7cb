"""The README and docs/: links lead somewhere, code compiles, and what they list is what the package has."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import inspect
import re
import shlex

import click
import pytest

import ffpa_jit
from ffpa_jit import settings
from ffpa_jit.cli import main
from tests.docs import PAGES, ROOT, anchors, blocks, links, prose, section, tables

DOCS = ROOT / "docs"
PYTHON = [block for page in PAGES for block in blocks(page, "python")]
FOLDERS = ("ffpa_jit", "bench", "tests", "examples", "docs")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pages
def test_every_relative_link_and_anchor_exists(page):
    broken = []
    for link in links(page):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_linked_from_the_readme():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert {page for page in PAGES if page.parent == DOCS} <= linked


@pages
def test_every_file_that_a_page_names_exists(page):
    text = page.read_text()
    named = re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text)
    missing = sorted({name for name in named if not (ROOT / name).exists()})
    assert not missing


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_every_python_block_compiles(block):
    tree = ast.parse(block.code)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "ffpa_jit"
                for alias in node.names}  # fmt: skip
    assert imported <= set(ffpa_jit.__all__)


def test_every_example_imports_what_it_uses():
    for block in blocks(DOCS / "examples.md", "python"):
        tree = ast.parse(block.code)
        bound = {alias.asname or alias.name.split(".")[0] for node in ast.walk(tree)
                 if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        bound |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        assert used <= bound | set(dir(builtins)), block


def test_the_examples_call_every_public_function_and_option():
    code = "".join(block.code for block in blocks(DOCS / "examples.md", "python"))
    functions = {name for name in ffpa_jit.__all__ if name.startswith("ffpa_attn") or name == "explain"}
    assert len(functions) == 5
    options = [name for name in inspect.signature(ffpa_jit.ffpa_attn_func).parameters if name != "unsupported"]
    options = options[3:]  # without the three tensors
    missing = [name for name in functions if f"{name}(" not in code]
    missing += [name for name in options if f"{name}=" not in code and name != "scale"]
    assert not missing


def test_examples_are_one_page_with_a_section_each():
    text = prose(DOCS / "examples.md")
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    with_code = {block.title for block in blocks(DOCS / "examples.md", "python")}
    assert set(titles) == with_code


def test_the_variables_are_those_of_settings():
    """docs/environment.md has the rows of the table in `settings`, with its defaults and times of reading."""
    (own,) = tables(settings.__doc__ or "")
    page, _ = tables(prose(DOCS / "environment.md"))
    assert own[0] == page[0] == ["variable", "default", "read", "meaning"]
    assert {row[0]: row[1:3] for row in page[1:]} == {row[0]: row[1:3] for row in own[1:]}


def test_the_table_of_settings_has_every_variable_that_it_reads():
    tree = ast.parse(inspect.getsource(settings))
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    read = {value for value in constants if isinstance(value, str) and re.fullmatch(r"[A-Z][A-Z_]{2,}", value)}
    (own,) = tables(settings.__doc__ or "")
    listed = {name for row in own[1:] for name in re.findall(r"`(\w+)`", row[0])}
    assert read == listed


BACKENDS = (ffpa_jit.TritonBackend, ffpa_jit.CUDABackend, ffpa_jit.CuTeDSLBackend, ffpa_jit.SDPABackend)


@pytest.mark.parametrize("kind", BACKENDS, ids=lambda kind: kind.__name__)
def test_the_options_of_a_backend_are_listed_with_their_defaults(kind):
    (table,) = tables(section(DOCS / "backends.md", kind.__name__))
    common = {field.name for field in dataclasses.fields(ffpa_jit.Backend)}
    fields = [field for field in dataclasses.fields(kind) if field.name not in common]
    listed = {name: row[1] for row in table[1:] for name in re.findall(r"`(\w+)`", row[0])}
    assert listed == {field.name: f"`{_written(field.default)}`" for field in fields}


def _written(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_the_steps_for_extending_name_what_is_in_the_code():
    text = prose(DOCS / "extending.md")
    names = set(re.findall(r"`([A-Za-z_]\w*)`", text))
    files = [path for folder in ("ffpa_jit", "bench", "tests") for path in (ROOT / folder).rglob("*")
             if path.suffix in (".py", ".json", ".cuh", ".cu") and path.name != "test_docs.py"]  # fmt: skip
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in files)))
    assert len(names) > 30
    assert names <= words, sorted(names - words)


def commands() -> list[tuple[str, ...]]:
    """Every `ffpa-jit` command line of a page, split, without the program's name."""
    found = []
    for page in PAGES:
        texts = [line for block in blocks(page, "") for line in block.code.splitlines()]
        texts += re.findall(r"`((?:\w+=\S+ )*ffpa-jit [^`]+)`", prose(page))
        for text in texts:
            match = re.search(r"\bffpa-jit ((?!/)[a-z].*)", text.partition("#")[0])
            if match and "|" not in match[1]:
                found.append(tuple(shlex.split(match[1].replace("…", ""))))
    return sorted(set(found))


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_and_its_options_exist(words):
    command: click.Command = main
    rest = list(words)
    while isinstance(command, click.Group) and rest:
        name = rest.pop(0)
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in rest if word.startswith("--")} <= options


def test_every_make_target_exists():
    makefile = (ROOT / "Makefile").read_text()
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)}
    missing = [name for name in sorted(named) if not re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE)]
    assert named
    assert not missing


def test_every_code_of_a_refusal_on_the_page_is_one_of_the_package():
    (table, *_) = tables(section(DOCS / "backends.md", "What each refuses"))
    listed = {code for row in table[1:] for code in re.findall(r"`([a-z_-]+)`", row[0])}
    sources = [path.read_text() for path in (ROOT / "ffpa_jit").rglob("*.py")]
    unknown = sorted(code for code in listed if not any(f'"{code}"' in source for source in sources))
    assert listed
    assert not unknown


RATE = re.compile(r"\d+ \(0\.\d\d\)")


def recorded(name: str) -> set[str]:
    """Every rate with its fraction in a file of results."""
    return set(RATE.findall((ROOT / name).read_text()))


@pytest.mark.parametrize("number", range(4))
def test_every_rate_of_a_table_is_in_the_results_that_its_text_names(number):
    """Each table of docs/benchmarks.md with rates is from one run: the file named last before it."""
    text = prose(DOCS / "benchmarks.md")
    files = list(re.finditer(r"bench/results/[\w.-]+\.md", text))
    with_rates = [match for match in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE) if RATE.search(match[0])]
    chosen = {}
    for table in with_rates:
        name = [match[0] for match in files if match.start() < table.start()][-1]
        chosen.setdefault(name, []).extend(RATE.findall(table[0]))
    assert len(chosen) == 4
    name, rates = list(chosen.items())[number]
    assert set(rates) <= recorded(name)


def test_the_table_of_the_readme_is_of_one_run():
    (table, *_) = tables(prose(ROOT / "README.md"))
    rates = {rate.partition(" ")[0] for rate in recorded("bench/results/nvidia-h200-bfloat16.md")}
    shown = {cell.strip("*") for row in table[1:] for cell in row[1:] if not cell.endswith("x")}
    assert len(table) == 7
    assert shown <= rates
