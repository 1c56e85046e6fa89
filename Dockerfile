# The course in a container, with everything but the images. In the course's folder, with Docker 23 or newer:
#   docker build --tag faster-pytorch-training .
#   docker run --rm --interactive --tty --shm-size=2g --publish 127.0.0.1:8888:8888 faster-pytorch-training
# It prints an address with a token: open it. On a machine with an NVIDIA GPU add  --gpus all  to the second line; for
# another build of PyTorch add  --build-arg TORCH_BACKEND=cpu  to the first.
# Its steps ran unchanged in a bare Debian 12 (a chroot), and hadolint has no findings. Docker has not built it yet.
FROM python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84

# make for the Makefile, g++ for torch.compile in notebook 12, Git for your own changes. Their versions are Debian's.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 --shell /bin/bash reader \
    && install --directory --owner reader --group reader /home/reader/.cache /home/reader/course /home/reader/kept

USER 1000
WORKDIR /home/reader/course
ARG TORCH_BACKEND=""

# The environment comes before the rest, so that a changed notebook does not install PyTorch again.
COPY --chown=1000:1000 Makefile pyproject.toml requirements.lock ./
COPY --chown=1000:1000 helpers/__init__.py helpers/
COPY --chown=1000:1000 stepscope/ stepscope/
RUN --mount=type=cache,target=/home/reader/.cache,uid=1000,gid=1000 make .venv/installed
COPY --chown=1000:1000 . .

# A browser sees only JupyterLab's port, and TensorBoard through it. Files to keep have their own folder.
ENV TENSORBOARD_PROXY_URL=/proxy/%PORT%/ COURSE_DATA=/home/reader/kept/data COURSE_RUNS=/home/reader/kept/runs
EXPOSE 8888
CMD ["make", "lab", "LAB=--ip=0.0.0.0 --no-browser"]
