"""The functions of GGML 0.15.3 that are called, as ctypes types.

Source: include/ggml.h, ggml-backend.h and ggml-alloc.h of the ggml-python 0.0.45 source
distribution. A test compares every entry with the bindings that ggml-python itself ships; they
are not imported because they fix the folder that the libraries are loaded from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

_P = ctypes.c_void_p
_I = ctypes.c_int
_L = ctypes.c_int64
_Z = ctypes.c_size_t
_F = ctypes.c_float
_B = ctypes.c_bool
_S = ctypes.c_char_p
_U = None

Signature = tuple[Any, tuple[Any, ...]]

MAX_DIMS = 4
MAX_NAME = 64


class InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", _Z), ("mem_buffer", _P), ("no_alloc", _B))


class TensorStruct(ctypes.Structure):
    """struct ggml_tensor."""

    _fields_ = (
        ("type", _I),
        ("buffer", _P),
        ("ne", _L * MAX_DIMS),
        ("nb", _Z * MAX_DIMS),
        ("op", _I),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", _I),
        ("src", _P * 10),
        ("view_src", _P),
        ("view_offs", _Z),
        ("data", _P),
        ("name", ctypes.c_char * MAX_NAME),
        ("extra", _P),
        ("padding", ctypes.c_char * 8),
    )


class DeviceProperties(ctypes.Structure):
    """struct ggml_backend_dev_props."""

    _fields_ = (
        ("name", _S),
        ("description", _S),
        ("memory_free", _Z),
        ("memory_total", _Z),
        ("type", _I),
        ("device_id", _S),
        ("caps_async", _B),
        ("caps_host_buffer", _B),
        ("caps_buffer_from_host_ptr", _B),
        ("caps_events", _B),
    )


FUNCTIONS: Mapping[str, Signature] = {
    "ggml_version": (_S, ()),
    "ggml_init": (_P, (InitParams,)),
    "ggml_free": (_U, (_P,)),
    "ggml_tensor_overhead": (_Z, ()),
    "ggml_graph_overhead_custom": (_Z, (_Z, _B)),
    "ggml_new_tensor": (_P, (_P, _I, _I, ctypes.POINTER(_L))),
    "ggml_set_name": (_P, (_P, _S)),
    "ggml_set_input": (_U, (_P,)),
    "ggml_set_output": (_U, (_P,)),
    "ggml_get_first_tensor": (_P, (_P,)),
    "ggml_get_next_tensor": (_P, (_P, _P)),
    "ggml_op_desc": (_S, (_P,)),
    "ggml_nbytes": (_Z, (_P,)),
    "ggml_get_data": (_P, (_P,)),
    "ggml_is_contiguous": (_B, (_P,)),
    "ggml_new_graph_custom": (_P, (_P, _Z, _B)),
    "ggml_build_forward_expand": (_U, (_P, _P)),
    "ggml_graph_add_node": (_U, (_P, _P)),
    "ggml_graph_n_nodes": (_I, (_P,)),
    "ggml_graph_node": (_P, (_P, _I)),
    # operations
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_mul_mat": (_P, (_P, _P, _P)),
    "ggml_norm": (_P, (_P, _P, _F)),
    "ggml_l2_norm": (_P, (_P, _P, _F)),
    "ggml_scale": (_P, (_P, _P, _F)),
    "ggml_scale_bias": (_P, (_P, _P, _F, _F)),
    "ggml_soft_max_ext": (_P, (_P, _P, _P, _F, _F)),
    "ggml_flash_attn_ext": (_P, (_P, _P, _P, _P, _P, _F, _F, _F)),
    "ggml_flash_attn_ext_set_prec": (_U, (_P, _I)),
    "ggml_custom_4d": (
        _P,
        (_P, _I, _L, _L, _L, _L, ctypes.POINTER(_P), _I, _P, _I, _P),
    ),
    "ggml_custom_inplace": (_P, (_P, _P, ctypes.POINTER(_P), _I, _P, _I, _P)),
    "ggml_relu": (_P, (_P, _P)),
    "ggml_gelu_erf": (_P, (_P, _P)),
    "ggml_sigmoid": (_P, (_P, _P)),
    "ggml_silu": (_P, (_P, _P)),
    "ggml_swiglu_split": (_P, (_P, _P, _P)),
    "ggml_get_rows": (_P, (_P, _P, _P)),
    "ggml_pad_ext": (_P, (_P, _P, *[_I] * 8)),
    "ggml_im2col_3d": (_P, (_P, _P, _P, _L, *[_I] * 10)),
    "ggml_concat": (_P, (_P, _P, _P, _I)),
    "ggml_cont": (_P, (_P, _P)),
    "ggml_permute": (_P, (_P, _P, _I, _I, _I, _I)),
    "ggml_reshape_4d": (_P, (_P, _P, _L, _L, _L, _L)),
    "ggml_view_4d": (_P, (_P, _P, _L, _L, _L, _L, _Z, _Z, _Z, _Z)),
    "ggml_repeat_4d": (_P, (_P, _P, _L, _L, _L, _L)),
    # allocation
    "ggml_gallocr_new": (_P, (_P,)),
    "ggml_gallocr_free": (_U, (_P,)),
    "ggml_gallocr_reserve_n_size": (_U, (_P, _P, _P, _P, ctypes.POINTER(_Z))),
    "ggml_gallocr_reserve": (_B, (_P, _P)),
    "ggml_gallocr_alloc_graph": (_B, (_P, _P)),
    "ggml_gallocr_get_buffer_size": (_Z, (_P, _I)),
    "ggml_backend_alloc_ctx_tensors_from_buft_size": (_Z, (_P, _P)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_tensor_set": (_U, (_P, _P, _Z, _Z)),
    "ggml_backend_tensor_get": (_U, (_P, _P, _Z, _Z)),
    "ggml_backend_buffer_name": (_S, (_P,)),
    "ggml_backend_buffer_free": (_U, (_P,)),
    "ggml_backend_buffer_get_size": (_Z, (_P,)),
    "ggml_backend_buffer_is_host": (_B, (_P,)),
    "ggml_backend_buffer_set_usage": (_U, (_P, _I)),
    "ggml_backend_buft_get_max_size": (_Z, (_P,)),
    # backends and devices
    "ggml_backend_load": (_P, (_S,)),
    "ggml_backend_reg_by_name": (_P, (_S,)),
    "ggml_backend_reg_name": (_S, (_P,)),
    "ggml_backend_reg_dev_get": (_P, (_P, _Z)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, _S)),
    "ggml_backend_dev_count": (_Z, ()),
    "ggml_backend_dev_get": (_P, (_Z,)),
    "ggml_backend_dev_get_props": (_U, (_P, ctypes.POINTER(DeviceProperties))),
    "ggml_backend_dev_backend_reg": (_P, (_P,)),
    "ggml_backend_dev_init": (_P, (_P, _S)),
    "ggml_backend_dev_buffer_type": (_P, (_P,)),
    "ggml_backend_dev_supports_op": (_B, (_P, _P)),
    "ggml_backend_free": (_U, (_P,)),
    "ggml_backend_graph_compute": (_I, (_P, _P)),
}
"""Name -> (result, arguments); every pointer is c_void_p, every enumeration c_int."""

LOG_CALLBACK = ctypes.CFUNCTYPE(None, _I, _S, _P)
SET_THREADS = ctypes.CFUNCTYPE(None, _P, _I)
