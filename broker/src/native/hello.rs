//! Hello: the first request on a connection.

use ringfence_engine::types::ShardId;

use super::wire::{ClusterId, NodeId, choice, layout};

choice! {
    /// What the other end is.
    pub enum Role as u8, "role" {
        /// A client: producers, consumers, tools.
        Client = 0,
        /// A broker of the cluster: may use replica fetches.
        Broker = 1,
    }
}

layout! {
    /// Who asks, and where the connection should live.
    pub struct HelloRequest {
        /// What the requester is.
        pub role: Role,
        /// The cluster it believes in; all zero is any.
        pub cluster: ClusterId,
        /// Its node, when it is a broker.
        pub node: Option<NodeId>,
        /// Its boot generation, when it is a broker; else 0.
        pub generation: u64,
        /// The shard that shall serve this connection; `None` is the one that accepted it.
        pub shard: Option<ShardId>,
        /// Name and version of the software, for logs.
        pub software: String,
    }

    /// Where the connection ended up, and what may be sent on it.
    pub struct HelloAnswer {
        /// The cluster.
        pub cluster: ClusterId,
        /// The answering broker.
        pub node: NodeId,
        /// Its boot generation.
        pub generation: u64,
        /// The shard that serves this connection from now on.
        pub shard: ShardId,
        /// Shards of this broker.
        pub shards: u16,
        /// Largest frame, in bytes, that it takes.
        pub max_frame: u32,
        /// Requests it works on at once per connection; more wait in the socket.
        pub max_in_flight: u16,
        /// Layout versions of every api it speaks.
        pub apis: Vec<ApiVersions>,
        /// Name and version of the software.
        pub software: String,
    }

    /// Versions of one api.
    pub struct ApiVersions {
        /// Number of the api.
        pub api: u8,
        /// Oldest version spoken.
        pub first: u8,
        /// Newest version spoken.
        pub last: u8,
    }
}

impl ApiVersions {
    /// What this build speaks.
    #[must_use]
    pub fn ours() -> Vec<ApiVersions> {
        super::Api::ALL
            .iter()
            .map(|api| ApiVersions {
                api: api.number(),
                first: *api.versions().start(),
                last: *api.versions().end(),
            })
            .collect()
    }
}

impl HelloAnswer {
    /// Stands in until the other end has said who it is.
    pub(crate) fn nobody() -> HelloAnswer {
        HelloAnswer {
            cluster: ClusterId::default(),
            node: NodeId::default(),
            generation: 0,
            shard: ShardId::default(),
            shards: 0,
            max_frame: 0,
            max_in_flight: 0,
            apis: Vec::new(),
            software: String::new(),
        }
    }
}
