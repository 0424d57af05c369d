"""The page of `satrap report`: what a run recorded, as one HTML file."""
