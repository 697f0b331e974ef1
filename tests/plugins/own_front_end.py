"""The front end of a package `toy`, which another package than p3kv has: servers run its optimizer,
and the framework's import attaches it."""

from typing import ClassVar, Dict, Optional

from own_optimizer import MakeMomentum
from p3kv.common.words import Words
from p3kv.frontends.front_end import FrontEnd


class Toy(FrontEnd):
    name = "toy"
    words = Words(use_store="toy.Store()")
    aliases: ClassVar[Dict[str, str]] = {"slice_size": "TOY_SLICE_SIZE"}
    prefix = "TOY_"
    make_optimizer = MakeMomentum

    def attach(self) -> None:
        import toy

        toy.attached = True

    def how_to_install(self) -> str:
        return "build one"

    def came_too_early(self, role: str) -> Optional[str]:
        return None
