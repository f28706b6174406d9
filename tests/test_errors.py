"""Each error of the catalogue is raised by its wrong example and not by its right one."""

from __future__ import annotations

import pickle
import pkgutil
import string
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch

import codetta
from codetta import errors, language
from codetta.author.candidate import load_candidate

CLASSES = errors.catalogue()
# Their examples need a broken installation, a GPU or a model; tests of codetta.nn raise them.
WITHOUT_WRONG = {
    "AutocastUnsupported",
    "ColdCapture",
    "MissingPackage",
    "NotPromoted",
    "NothingToTune",
    "PackSharded",
    "ShardedParameters",
    "TooLarge",
}
WITHOUT_RIGHT = {*WITHOUT_WRONG, "UnknownModel", "UnsupportedModel"}


def namespace():
    """What the examples may use: torch, codetta, a (5, 4), b (4, 6), and all of the language."""
    names = {name: getattr(language, name) for name in language.__all__}
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(5, 4, generator=generator), torch.randn(4, 6, generator=generator)
    return {"torch": torch, "codetta": codetta, **names, "a": a, "b": b}


def execute(cls, code):
    """Run an example: as it stands, or as a file given to the author tools."""
    if getattr(cls, "examples_are_files", False):
        load(code, 0.5 if cls is errors.CandidateTimeout and code == cls.wrong else 60.0)
    else:
        exec(compile(code, "<example>", "exec"), namespace())


@cache  # a process each, and most right examples are the same
def load(code, timeout_s):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "candidate.py")
        file.write_text(code)
        load_candidate(file, timeout_s=timeout_s)


def test_the_catalogue_is_that_of_the_modules_of_the_package():
    assert len(CLASSES) == len({cls.__name__ for cls in CLASSES}) >= 40
    modules = [
        import_module(f"{errors.__name__}.{m.name}") for m in pkgutil.iter_modules(errors.__path__)
    ]
    defined = {
        x
        for module in modules
        for x in vars(module).values()
        if isinstance(x, type) and issubclass(x, errors.CodettaError)
    }
    assert {cls for cls in defined if "template" in vars(cls)} == {*CLASSES, errors.CodettaError}
    assert {getattr(errors, name) for name in errors.__all__} == {*defined, errors.catalogue}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_wrong_example_raises_this_error(cls):
    if cls.__name__ in WITHOUT_WRONG:
        assert not cls.wrong
        return
    with pytest.raises(errors.CodettaError) as caught:
        execute(cls, cls.wrong)
    assert type(caught.value) is cls, str(caught.value)
    message = str(caught.value)
    assert "{" not in message.split("\n")[0].replace("{k", ""), message
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), cls)
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_right_example_raises_nothing(cls):
    if cls.__name__ in WITHOUT_RIGHT:
        assert not cls.right
        return
    execute(cls, cls.right)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_the_message_has_fields_and_a_builtin_base(cls):
    fields = [name for _, name, _, _ in string.Formatter().parse(cls.template) if name]
    assert fields
    builtin = (TypeError, ValueError, RuntimeError, LookupError, ImportError)
    assert issubclass(cls, builtin)


def test_an_error_while_tracing_ends_with_the_line_of_the_author():
    with pytest.raises(errors.WidthMismatch) as caught:

        @codetta.epilogue
        def f(acc, c: language.Tile):
            g, u = language.unpack(acc)
            return g * u + c  # this line

    line = str(caught.value).splitlines()[-1]
    assert line.strip().startswith("at ")
    assert "test_errors.py" in line
    assert line.endswith("return g * u + c  # this line")
