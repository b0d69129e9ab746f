from dmjd.api import Run as Run
from dmjd.api import ap as ap
from dmjd.api import detect as detect
from dmjd.api import finetune as finetune
from dmjd.api import knn as knn
from dmjd.api import linprobe as linprobe
from dmjd.api import miou as miou
from dmjd.api import pretrain as pretrain
from dmjd.api import segment as segment
from dmjd.api import validate as validate
from dmjd.encoder import Classifier as Classifier
from dmjd.encoder import Encoder as Encoder
from dmjd.encoder import load_classifier as load_classifier
from dmjd.encoder import load_encoder as load_encoder
from dmjd.errors import UserError as UserError
from dmjd.explore.embeddings import Embeddings as Embeddings
from dmjd.explore.embeddings import read_embeddings as read_embeddings
from dmjd.report import write_comparison as write_comparison
from dmjd.report import write_report as write_report

__version__: str
