"""The specification of ``flashbwd::attn``: what it computes, written to be read, in float64, O(N^2).

Every kernel of the package is tested against this.

    s_ij  = scale * sum_d q_id k_jd                  scale = 1 / sqrt(D) if not given
    z_ij  = softcap * tanh(s_ij / softcap)           z = s without a softcap
    query i sees key j  iff  lower <= j - i <= upper
    lse_i = log sum_{j seen by i} exp(z_ij)          -inf if i sees nothing
    p_ij  = exp(z_ij - lse_i)                        0 if i doesn't see j
    out_i = sum_j p_ij v_j                           0 if i sees nothing

Backward, with dO = grad_out, dL = grad_lse (the derivation of the FlashAttention paper, Dao et al. 2022,
appendix B.2, extended by the softcap and by the gradient of lse):

    delta_i = sum_d dO_id out_id - dL_i
    dv_j    = sum_i p_ij dO_i
    dz_ij   = p_ij * (dO_i . v_j - delta_i)
    ds_ij   = dz_ij * (1 - tanh(s_ij / softcap)^2)
    dq_i    = scale * sum_j ds_ij k_j
    dk_j    = scale * sum_i ds_ij q_i

A pair that isn't seen contributes nothing, not even 0 * inf.  Query heads h*G .. h*G + G - 1 share key head h, whose
gradients are the sums over them.
"""

from .attention import attention_backward, attention_forward, visible

__all__ = ["attention_backward", "attention_forward", "visible"]
