// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Adam's arithmetic, on vectors or on single numbers; included within their namespace.

template <bool kL2>
struct AdamUpdate {
  DEEPTIDE_HOST_DEVICE V operator()(V p, V g, V& m, V& v) const {
    const D d;
    if constexpr (kL2) g = hn::MulAdd(hn::Set(d, s.l2_decay), p, g);
    p = hn::Mul(p, hn::Set(d, s.keep));

    m = lerp(m, g, s.first_weight);
    const V decayed = hn::Mul(v, hn::Set(d, s.second_keep));
    v = hn::MulAdd(hn::Mul(g, hn::Set(d, s.second_weight)), g, decayed);

    const V denominator = hn::Add(hn::Div(hn::Sqrt(v), hn::Set(d, s.root_scale)), hn::Set(d, s.eps));
    return hn::Sub(p, hn::Div(hn::Mul(hn::Set(d, s.step_size), m), denominator));
  }
  AdamScalars s;
};
