"""Colours that people with any kind of colour vision can tell apart: a category has the same one in every figure."""

# Okabe and Ito, Color Universal Design, 2008: https://jfly.uni-koeln.de/color/
ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#BBBBBB"
NEUTRAL, PALE = "#8C9BA5", "#DCE3E8"  # for what belongs to no category
COLOURS = {
    "Kernel": GREEN,
    "Memcpy": YELLOW,
    "Memset": PURPLE,
    "Communication": "black",
    "Runtime": SKY,
    "DataLoader": VERMILION,
    "CPU Exec": BLUE,
    "Other": GREY,
    "loading": VERMILION,
    "copy": YELLOW,
    "forward": BLUE,
    "backward": SKY,
    "optimizer": PURPLE,
    "open and read": PURPLE,
    "header": YELLOW,
    "decode": VERMILION,
    "resize": ORANGE,
    "crop and flip": GREEN,
    "to tensor": SKY,
    "normalize": GREEN,
    "collate": BLUE,
    "transfer": "black",
    "the rest": GREY,
    "compute": BLUE,
    "waiting": VERMILION,
    "step": BLUE,
    "products and convolutions": BLUE,
    "attention": SKY,
    "normalization": VERMILION,
    "elementwise": ORANGE,
    "compiled": YELLOW,
    "pooling": PURPLE,
}
# For several lines or marks: colour, dashes and marker of each
LOOKS = (
    (BLUE, "-", "o"),
    (ORANGE, "--", "s"),
    (GREEN, ":", "^"),
    (PURPLE, "-.", "D"),
    ("black", (0, (8, 3)), "v"),
    (VERMILION, (0, (4, 1, 1, 1, 1, 1)), "P"),
)
