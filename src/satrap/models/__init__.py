"""Ready models, plain nn.Modules that map dense features [batch, num_dense] (or None) and embeddings [batch, total_dim]
to logits.

They are written to be read and changed: copy one into your own code to extend it. None of them uses tables.
"""

from satrap.models.dcn import DCN
from satrap.models.dlrm import DLRM
from satrap.models.ffnn import FFNN

__all__ = ["DCN", "DLRM", "FFNN"]
