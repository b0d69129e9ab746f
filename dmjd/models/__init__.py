import warnings

# Of tqdm, which timm imports, in every notebook without ipywidgets.
warnings.filterwarnings("ignore", message="IProgress not found")
