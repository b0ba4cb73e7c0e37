"""Readers of published checkpoints into the model of `models.gpt`; nothing is ever unpickled."""

from models.pretrained.model import Pretrained as Pretrained
from models.pretrained.model import open_model as open_model
from models.pretrained.source import ModelError as ModelError
