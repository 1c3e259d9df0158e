"""Questions about FlagGems under the names of vllm-plugin-FL; the answers are the configuration's."""

from __future__ import annotations


def use_flaggems_op(op_name: str, default: bool = True) -> bool:
    """Whether the configuration lets FlagGems serve this operator (one of the catalogue or of ATen).

    Args:
        op_name: the operator.
        default: the answer where FlagGems is on and no list names the operator.
    """
    from vllm_fl.config import get_settings

    settings = get_settings()
    if not (settings.use_flaggems and settings.prefer_enabled) or op_name in settings.flagos_blacklist:
        return False
    return default if settings.flagos_whitelist is None else op_name in settings.flagos_whitelist


def get_flag_gems_whitelist_blacklist() -> tuple[list[str] | None, list[str] | None]:
    """The lists of operators that FlagGems may and may not serve, sorted; None for a list that does not exist."""
    from vllm_fl.config import get_settings

    settings = get_settings()
    white = None if settings.flagos_whitelist is None else sorted(settings.flagos_whitelist)
    return white, sorted(settings.flagos_blacklist) or None


def get_flaggems_all_ops() -> list[str]:
    """Names of the functions that the installed FlagGems offers in the place of ATen's, sorted.

    Raises:
        ImportError: FlagGems is not installed.
    """
    from vllm_fl.flagos.aten import flaggems_table
    from vllm_fl.flagos.availability import INSTALL_FLAGGEMS

    table = flaggems_table()
    if table is None:
        raise ImportError(f"FlagGems is not installed; {INSTALL_FLAGGEMS}")
    return sorted({function for _, function in table})
