//! Connections that change shards: the Hello named another one.
//!
//! Old shard: stop receiving, release the descriptor, send it with the Hello and every byte received after it. New
//! shard: take the descriptor over, answer the Hello, go on with those bytes. A connection that dies on the way is
//! closed by dropping its descriptor.

use std::collections::HashMap;

use ringfence_engine::io::{ConnId, NetOp, Socket};
use ringfence_engine::types::{Now, ShardId};

use super::Shard;
use super::table::Table;
use crate::event::{Handover, Mail, Outbox, Peer};
use crate::native::{Api, HelloRequest};

/// Connections on their way, both ways.
#[derive(Debug, Default)]
pub(super) struct Handovers {
    leaving: HashMap<ConnId, (ShardId, HelloRequest, u64)>,
    arriving: Table<Arrival>,
}

#[derive(Debug)]
struct Arrival {
    peer: std::net::SocketAddr,
    hello: HelloRequest,
    correlation: u64,
    rest: Vec<u8>,
}

impl Shard {
    /// Begins to hand a connection to the shard that its Hello named.
    pub(super) fn hand_over(
        &mut self,
        conn: ConnId,
        to: ShardId,
        hello: HelloRequest,
        correlation: u64,
        out: &mut Outbox,
    ) {
        self.listener.leave(conn, &mut out.net);
        self.handovers.leaving.insert(conn, (to, hello, correlation));
    }

    pub(super) fn on_released(&mut self, conn: ConnId, socket: Socket, out: &mut Outbox) {
        let left = self.listener.left(conn);
        let leaving = self.handovers.leaving.remove(&conn);
        if let (Some(left), Some((to, hello, correlation))) = (left, leaving) {
            self.stats.handovers.add(1);
            let handover = Handover {
                socket,
                peer: left.peer,
                hello,
                correlation,
                rest: left.rest,
            };
            out.mail
                .push((Peer::Shard(to), Mail::Connection(Box::new(handover))));
        }
    }

    pub(super) fn on_handover(&mut self, handover: Handover, out: &mut Outbox) {
        let Handover {
            socket,
            peer,
            hello,
            correlation,
            rest,
        } = handover;
        let tag = self.handovers.arriving.insert(Arrival {
            peer,
            hello,
            correlation,
            rest,
        });
        out.net.push(NetOp::Adopt { socket, tag });
    }

    pub(super) fn on_adopted(&mut self, now: Now, conn: ConnId, tag: u64, out: &mut Outbox) {
        let Some(arrival) = self.handovers.arriving.remove(tag) else {
            out.net.push(NetOp::Close { conn, abort: true });
            return;
        };
        let Some(seq) = self.listener.adopted(now, conn, arrival.peer, &mut out.net) else {
            return;
        };
        let answer = self.hello_answer().encode(Api::Hello, arrival.correlation);
        self.listener.answer(now, conn, seq, answer, &mut out.net);
        self.listener.received(now, conn, &arrival.rest, &mut out.net);
        tracing::trace!(%conn, software = %arrival.hello.software, "connection taken over");
    }

    pub(super) fn on_closed(&mut self, conn: ConnId, out: &mut Outbox) {
        self.handovers.leaving.remove(&conn);
        if self.listener.closed(conn) {
            self.home.hurry_connection(self.id, conn, out);
        }
    }
}
