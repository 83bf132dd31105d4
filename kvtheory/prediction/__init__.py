"""What predicts a cache: players of models, and (predictors) what the next position's keys and values are expected to be.

Source: arXiv 2604.15356, sections on the entropy bound and on predictive delta coding.
"""

from kvtheory.prediction.player import Play, Player, TokenKV, law_weights
from kvtheory.prediction.toy import ToyPlayer

__all__ = ["Play", "Player", "TokenKV", "ToyPlayer", "law_weights"]
