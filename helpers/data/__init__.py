"""The images: CIFAR-10, photos, and drawn ones that stand in for both."""
