# SPDX-License-Identifier: Apache-2.0
build:
	cmake -S . -B build -G Ninja -DPython3_EXECUTABLE=$(CURDIR)/.venv/bin/python
	cmake --build build
