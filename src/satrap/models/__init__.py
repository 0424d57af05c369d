"""Ready models, plain nn.Modules. DLRM, DCN, DeepFM and FFNN map dense features [batch, num_dense] (or None) and
embeddings [batch, total_dim] to logits; DIN takes a history as well. HSTU, SASRec and TwoTower give vectors to search
with.

They are written to be read and changed: copy one into your own code to extend it. None of them uses tables.
"""

try:
    from satrap.models.dcn import DCN
    from satrap.models.deepfm import DeepFM
    from satrap.models.din import DIN
    from satrap.models.dlrm import DLRM
    from satrap.models.ffnn import FFNN
    from satrap.models.hstu import HSTU
    from satrap.models.sasrec import SASRec
    from satrap.models.two_tower import TwoTower
except ModuleNotFoundError as error:
    raise ImportError(f"satrap.models needs {error.name}: pip install 'satrap[train]'", name=error.name) from error

__all__ = ["DCN", "DIN", "DLRM", "FFNN", "HSTU", "DeepFM", "SASRec", "TwoTower"]
