"""Seed a mutant into this process, before anything of the project is imported."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from tests.mutants.catalog import MUTANTS, Change


class _Loader(SourceFileLoader):
    """Compile a module's changed source; its bytecode is neither read nor written."""

    def __init__(self, name: str, path: str, changes: Sequence[Change]) -> None:
        super().__init__(name, path)
        self._changes = changes

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path).decode()
        for change in self._changes:
            source = change.apply(source)
        code: CodeType = compile(source, self.path, "exec", dont_inherit=True)
        return code


class _Finder(MetaPathFinder):
    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        changes = [change for change in self._changes if change.module == fullname]
        spec = PathFinder.find_spec(fullname, path) if changes else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, changes)
        return spec


def seed(name: str) -> None:
    sys.meta_path.insert(0, _Finder(MUTANTS[name].changes))
