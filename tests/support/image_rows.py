"""Images as the rows of a task, without the detour through `Task`."""

from __future__ import annotations

from functools import partial

from lamina.tasks.file_classification import dataset_files, file_column, file_split, read_class_files
from lamina.tasks.image_classification import LazyImage

image_column = partial(file_column, file_class=LazyImage)
dataset_images = partial(dataset_files, file_class=LazyImage)
read_images = partial(read_class_files, file_class=LazyImage)
image_split = file_split
