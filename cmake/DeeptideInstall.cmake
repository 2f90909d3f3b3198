# SPDX-License-Identifier: Apache-2.0
# Installed CMake package and wheel contents.
