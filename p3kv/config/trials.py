"""Environment by which 'p3kv compare' and 'p3kv tune' instruct the processes of a trial."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Dict, Mapping, Optional

from p3kv.config.settings import Settings, variable_of
from p3kv.config.trial import FIFO, Trial
from p3kv.config.unknown import TRIAL, told_of
from p3kv.config.variables import text_of


def trial(environ: Mapping[str, str] = os.environ) -> Optional[Trial]:
    """The trial to which this process belongs; None for all other jobs."""
    text = text_of(TRIAL, environ)
    return Trial.parsed(TRIAL, text) if text else None


def environment_of(
    tried: Trial, slice_size: Optional[int] = None, environ: Mapping[str, str] = os.environ
) -> Dict[str, str]:
    """This process's environment as the processes of a trial get it; `slice_size` None: as it is
    there."""
    size = {} if slice_size is None else {variable_of("slice_size"): str(slice_size)}
    return {**environ, **told_of(environ), **size, TRIAL: str(tried)}


def settings_of_a_trial(settings: Settings, tried: Trial) -> Settings:
    """A trial writes no files of p3kv's, also where a script asks for them."""
    gradients, values = tried.codecs
    return replace(
        settings,
        gradient_codec=gradients or settings.gradient_codec,
        value_codec=values or settings.value_codec,
        priorities=tried.store != FIFO,
        checkpoint_dir=None,
        resume=False,
        trace=None,
        summary_every=0,
        metrics_port=None,
    )
