"""What predicts a cache: players of models, predictors of the next position's keys and values, and what a mean leaves (mixture).

    predictor        needs                     target passes a position   fitted
    Nothing          -                         0                          mean
    PreviousToken    -                         0                          -
    LayerLinear      -                         0                          maps between layers (AQUA-KV)
    TokenTable       tokens, or the law        0, or 1                    a mean for each token id
    EmbeddingLinear  tokens, or the law        0, or 1                    offset + matrix on the embedding
    SmallerModel     tokens, another model     0                          maps from its layers
    TopK             the law                   k + 1                      -
    FullVocabulary   the law                   |V| + 1                    -
    KnownToken       the tokens                1                          -

Source: arXiv 2604.15356, sections on the entropy bound and on predictive delta coding; theory A8, A9.
"""

from kvtheory.prediction import mixture
from kvtheory.prediction.by_model import FullVocabulary, KnownToken, TopK
from kvtheory.prediction.fitted import EmbeddingLinear, LayerLinear, Nothing, PreviousToken, TokenTable
from kvtheory.prediction.player import Play, Player, TokenKV, law_weights
from kvtheory.prediction.predictor import Fixed, Known, Prediction, Predictor, Running
from kvtheory.prediction.smaller import SmallerModel
from kvtheory.prediction.toy import ToyPlayer

__all__ = [
    "EmbeddingLinear",
    "Fixed",
    "FullVocabulary",
    "Known",
    "KnownToken",
    "LayerLinear",
    "Nothing",
    "Play",
    "Player",
    "Prediction",
    "Predictor",
    "PreviousToken",
    "Running",
    "SmallerModel",
    "TokenKV",
    "TokenTable",
    "ToyPlayer",
    "TopK",
    "law_weights",
    "mixture",
]
