// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Linear interpolation, on vectors or on single numbers; included within their namespace.

/// torch's lerp: from the nearer end, so that weights 0 and 1 are exact.
DEEPTIDE_HOST_DEVICE V lerp(V from, V to, float weight) {
  const bool near_from = weight < 0.5f;
  const V factor = hn::Set(D(), near_from ? weight : weight - 1.0f);
  return hn::MulAdd(factor, hn::Sub(to, from), near_from ? from : to);
}
