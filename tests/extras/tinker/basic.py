"""Runs `sl_basic` or `rl_basic` of the cookbook with small batches: their data sets cannot be changed by arguments.

python basic.py sl_basic|rl_basic MODEL BATCH_SIZE [KEY=VALUE ...]
"""

from __future__ import annotations

import importlib
import sys

import chz

recipe, model, batch_size, *arguments = sys.argv[1:]
module = importlib.import_module(f"tinker_cookbook.recipes.{recipe}")
config = module.build_config_blueprint(model).make_from_argv([f"model_name={model}", *arguments])
data = config.dataset_builder
if recipe == "sl_basic":
    data = chz.replace(data, common_config=chz.replace(data.common_config, batch_size=int(batch_size)))
else:
    data = chz.replace(data, batch_size=int(batch_size), group_size=8)
module.main(chz.replace(config, dataset_builder=data))
