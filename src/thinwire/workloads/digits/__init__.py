"""Classification of scikit-learn's images of digits."""
