"""One reliable connected queue pair, and what each side must know of the other's."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from typing import Any, Self

from engine.link import LinkError
from engine.link.verbs_config import MTU_BYTES, RNR_RETRY, VerbsConfig
from engine.link.verbs_device import VerbsDevice
from engine.link.verbs_errors import enums, pyverbs, verb
from engine.link.verbs_gid import gid_address

MTU_CODES = {size: code for code, size in MTU_BYTES.items()}
PSN_BITS = 24
MIN_RNR_TIMER = 12  # 0.64 ms (table 45 of the InfiniBand specification, volume 1)
MAX_READS = 4  # RDMA READs in flight per queue pair
HOP_LIMIT = 64


@dataclass(frozen=True, slots=True)
class QueuePairFacts:
    """A queue pair as its peer sees it. `rkey`, `address`, `num_bytes` describe the registered
    memory; zero on the side that offers none.
    """

    qpn: int
    psn: int
    gid: str
    mtu_bytes: int
    rkey: int = 0
    address: int = 0
    num_bytes: int = 0

    def to_mapping(self) -> dict[str, Any]:
        """As JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, fields: Any) -> QueuePairFacts:
        """The inverse; ValueError for anything that is not one."""
        if not isinstance(fields, dict):
            raise ValueError("a queue pair's facts must be an object")
        try:
            facts = cls(**fields)
        except TypeError as error:
            raise ValueError(f"not a queue pair's facts: {error}") from error
        for name in ("qpn", "psn", "mtu_bytes", "rkey", "address", "num_bytes"):
            if type(getattr(facts, name)) is not int:
                raise ValueError(f"{name} must be a number")
        if type(facts.gid) is not str or facts.mtu_bytes not in MTU_CODES:
            raise ValueError("gid must be text and mtu_bytes one of RDMA's sizes")
        return facts


class QueuePair:
    """A queue pair with its completion queue. A context manager; `close` is idempotent.

    access: what the peer may do through it (0 on the SmartNIC's side).
    """

    def __init__(self, device: VerbsDevice, config: VerbsConfig, *, access: int) -> None:
        self._enums = enums()
        self._device = device
        self._config = config
        self.psn = secrets.randbits(PSN_BITS)
        self.mtu_bytes = device.mtu_bytes
        depth = config.queue_depth
        with verb("ibv_create_cq"):
            self.cq: Any = pyverbs("cq").CQ(device.context, depth)
        module = pyverbs("qp")
        cap = module.QPCap(
            max_send_wr=depth,
            max_recv_wr=1,
            max_send_sge=1,
            max_recv_sge=1,
            max_inline_data=config.inline_bytes,
        )
        initial = module.QPInitAttr(
            qp_type=self._enums.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0
        )
        with verb("ibv_create_qp"):
            self.qp: Any = module.QP(device.pd, initial)
        attributes = module.QPAttr(port_num=device.port)
        attributes.qp_access_flags = access
        with verb("ibv_modify_qp to INIT"):
            self.qp.to_init(attributes)
        self._attributes = attributes

    def facts(self, region: Any = None) -> QueuePairFacts:
        """For the peer; `region` is the memory region that it may reach."""
        memory: dict[str, int] = {}
        if region is not None:
            memory = {"rkey": region.rkey, "address": region.buf, "num_bytes": region.length}
        gid = self._device.gid.gid
        return QueuePairFacts(self.qp.qp_num, self.psn, gid, self.mtu_bytes, **memory)

    def connect(self, peer: QueuePairFacts) -> None:
        """To RTS, towards `peer`. Raises LinkError naming the step."""
        addr = pyverbs("addr")
        route = addr.GlobalRoute(
            dgid=addr.GID(peer.gid), sgid_index=self._device.gid.index, hop_limit=HOP_LIMIT
        )
        attributes, port = self._attributes, self._device.port
        attributes.ah_attr = addr.AHAttr(port_num=port, is_global=1, dlid=0, gr=route)
        self.mtu_bytes = min(self.mtu_bytes, peer.mtu_bytes)
        attributes.path_mtu = MTU_CODES[self.mtu_bytes]
        attributes.dest_qp_num = peer.qpn
        attributes.rq_psn, attributes.sq_psn = peer.psn, self.psn
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = MAX_READS
        attributes.min_rnr_timer = MIN_RNR_TIMER
        attributes.timeout = self._config.timeout
        attributes.retry_cnt = self._config.retry_count
        attributes.rnr_retry = RNR_RETRY
        with verb(f"ibv_modify_qp to RTR towards {gid_address(peer.gid)}"):
            self.qp.to_rtr(attributes)
        with verb("ibv_modify_qp to RTS"):
            self.qp.to_rts(attributes)

    @property
    def state(self) -> str:
        """RESET, INIT, RTR, RTS, SQD, SQE or ERR."""
        with verb("ibv_query_qp"):
            attributes, _ = self.qp.query(self._enums.IBV_QP_STATE)
        names = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
        return names[attributes.qp_state]

    def break_off(self) -> None:
        """To the state ERR, as after a failure of the device: for fault injection."""
        attributes = pyverbs("qp").QPAttr(qp_state=self._enums.IBV_QPS_ERR)
        with verb("ibv_modify_qp to ERR"):
            self.qp.modify(attributes, self._enums.IBV_QP_STATE)

    def close(self) -> None:
        """Destroy it: nothing that the peer sends to it has an effect any more."""
        try:
            self.qp.close()
            self.cq.close()
        except pyverbs("pyverbs_error").PyverbsError as error:
            raise LinkError(f"ibv_destroy_qp failed: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
