"""Where the shape of a model is read from, when the model itself may not have been fetched yet."""

from __future__ import annotations

from pathlib import Path

from megarl.errors import UserError


def shape_folder(config_file: str | Path, model_path: str) -> Path:
    """A folder with the model's config.json: `model_path`, else models/<its last part> beside the config's folder.

    examples/ keeps such folders for its presets. Raises UserError naming all places when none has one.
    """
    name = Path(model_path).name
    folder = Path(config_file).resolve().parent
    places = [Path(model_path), folder / "models" / name, folder.parent / "models" / name]
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise UserError(f"model.path = {model_path}: no config.json in {', '.join(map(str, places))}")
