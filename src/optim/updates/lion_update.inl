// SPDX-FileCopyrightText: The Deeptide authors
// SPDX-License-Identifier: Apache-2.0
// Lion's arithmetic, on vectors or on single numbers; included within their namespace.

struct LionUpdate {
  DEEPTIDE_HOST_DEVICE V operator()(V p, V g, V& m) const {
    const D d;
    // Not fused, so that every instruction set gives the same sign.
    const V c = hn::Add(hn::Mul(m, hn::Set(d, s.direction_keep)), hn::Mul(g, hn::Set(d, s.direction_in)));
    m = hn::Add(hn::Mul(m, hn::Set(d, s.momentum_keep)), hn::Mul(g, hn::Set(d, s.momentum_in)));
    const auto has_sign = hn::Gt(hn::Abs(c), hn::Zero(d));
    const V move = hn::IfThenElse(has_sign, hn::CopySign(hn::Set(d, s.lr), c), c);  // c itself where it is 0 or NaN
    return hn::Sub(hn::Mul(p, hn::Set(d, s.keep)), move);
  }
  LionScalars s;
};
