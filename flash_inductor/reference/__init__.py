"""The specification of ``flashbwd::attn``: what it computes, written to be read, in float64, O(N^2).

Every kernel of the package is tested against this.

    s_ij  = scale * sum_d q_id k_jd                  scale = 1 / sqrt(D) if not given
    z_ij  = softcap * tanh(s_ij / softcap) + bias_ij z = s without a softcap and a bias
    query i sees key j  iff  lower <= j - i <= upper, and mask_ij, and query_segments_i == key_segments_j,
                             and bias_ij is not -inf; as far as they are given
    lse_i = log (sum_{j seen by i} exp(z_ij) + exp(sink))   -inf if i sees nothing and there is no sink
    p_ij  = exp(z_ij - lse_i)                        0 if i doesn't see j
    w_ij  = p_ij * kept_ij / (1 - dropout_p)         p without dropout; kept_ij as in ``dropout.py``
    out_i = sum_j w_ij v_j                           0 if i sees nothing

bias and mask are [B, Hq, Nq, Nk], segments [B, Nq] and [B, Nk]; each dim of bias and mask, and the batch of segments,
may be 1; sinks are [Hq].

Backward, with dO = grad_out, dL = grad_lse (the derivation of the FlashAttention paper, Dao et al. 2022,
appendix B.2, extended by the softcap, the bias, the sinks, dropout and the gradient of lse):

    delta_i = sum_d dO_id out_id - dL_i
    dv_j    = sum_i w_ij dO_i
    dz_ij   = p_ij * (dO_i . v_j * kept_ij / (1 - dropout_p) - delta_i)
    ds_ij   = dz_ij * (1 - tanh(s_ij / softcap)^2)
    dq_i    = scale * sum_j ds_ij k_j
    dk_j    = scale * sum_i ds_ij q_i
    dbias   = dz, summed over the dims where bias has size 1
    dsink   = -sum_{b,i} exp(sink - lse_i) * delta_i

With a bias, a row whose lse is below -2^20 gives no gradients (p = 0 in the backward): such a bias, finfo.min say,
stands for -inf, and lse has no digits left for differences of scores.

A pair that isn't seen contributes nothing, not even 0 * inf.  Query heads h*G .. h*G + G - 1 share key head h, whose
gradients are the sums over them.
"""

from .attention import Extras, attention_backward, attention_forward, visible
from .dropout import kept, philox

__all__ = ["Extras", "attention_backward", "attention_forward", "kept", "philox", "visible"]
