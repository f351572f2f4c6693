/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Headers, and what the steps know of a packet.
 */

const bit<16> ETHERTYPE_IPV4 = 0x0800;
const bit<16> ETHERTYPE_IPV6 = 0x86dd;
const bit<8> PROTOCOL_IPIP = 4;
const bit<8> PROTOCOL_TCP = 6;
const bit<8> PROTOCOL_UDP = 17;
const bit<8> PROTOCOL_IPV6 = 41;
const bit<8> PROTOCOL_ROUTING = 43;

header ethernet_t {
    bit<48> destination;
    bit<48> source;
    bit<16> ethertype;
}

header ipv4_t {
    bit<4>  version;
    bit<4>  header_length; /* in units of 4 bytes */
    bit<8>  traffic_class;
    bit<16> length;
    bit<16> identification;
    bit<2>  flags;
    bit<1>  more_fragments;
    bit<13> fragment_offset;
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    bit<32> source;
    bit<32> destination;
}

header ipv4_options_t {
    varbit<320> octets;
}

header ipv6_t {
    bit<4>   version;
    bit<8>   traffic_class;
    bit<20>  flow_label;
    bit<16>  payload_length;
    bit<8>   next_header;
    bit<8>   hop_limit;
    bit<128> source;
    bit<128> destination;
}

header tcp_t {
    bit<16> source_port;
    bit<16> destination_port;
    bit<32> sequence;
    bit<32> acknowledgement;
    bit<4>  data_offset; /* in units of 4 bytes */
    bit<4>  reserved;
    bit<8>  flags;
    bit<16> window;
    bit<16> checksum;
    bit<16> urgent;
}

const bit<8> TCP_FIN = 0x01;
const bit<8> TCP_SYN = 0x02;
const bit<8> TCP_RST = 0x04;
const bit<8> TCP_ACK = 0x10;

/* An option of TCP in front of the timestamps. What follows is not parsed. */
header tcp_option_t {
    varbit<320> octets;
}

const bit<8> OPTION_END = 0;
const bit<8> OPTION_NO_OPERATION = 1;
const bit<8> OPTION_TIMESTAMPS = 8;

header udp_t {
    bit<16> source_port;
    bit<16> destination_port;
    bit<16> length;
    bit<16> checksum;
}

/* The beginning of a packet of QUIC with a short header (RFC 9000 section 17.3). Such packets have
 * at least 21 bytes (RFC 9001 section 5.4.2). */
header quic_t {
    bit<1>   has_long_header;
    bit<7>   unused;
    bit<3>   rotation;
    bit<125> id; /* the rest of the connection ID, as far as it can contain a server ID */
}

/* The segment routing header (RFC 8754 section 2). Its segments are headers of their own, because
 * their number varies. */
header srh_t {
    bit<8>  next_header;
    bit<8>  length; /* in units of 8 bytes, without the first 8 */
    bit<8>  routing_type;
    bit<8>  segments_left;
    bit<8>  last_entry;
    bit<8>  flags;
    bit<16> tag;
}

const bit<8> ROUTING_TYPE_SRH = 4;

/* The header in front of the client's. Its destination is the SID of the first server. */
header outer_t {
    bit<4>   version;
    bit<8>   traffic_class;
    bit<20>  flow_label;
    bit<16>  payload_length;
    bit<8>   next_header;
    bit<8>   hop_limit;
    bit<128> source;
}

/* The SID of a server, with the argument of offers (docs/understand/protocol.md). */
header sid_t {
    bit<64> locator;
    bit<16> function;
    bit<4>  column;
    bit<1>  reports; /* the balancer takes load reports */
    bit<2>  cookie_width;
    bit<1>  returns; /* a server without the flow returns the packet to the balancer */
    bit<40> load;    /* written by the server */
}

/* A segment that is not a SID. */
header segment_t {
    bit<128> address;
}

/* In the order in which they are sent. The segment that is visited last comes first. */
struct headers_t {
    ethernet_t       ethernet;
    outer_t          outer;       /* srv6-insert: the client's header */
    sid_t            destination; /* of the outer header */
    srh_t            srh;
    segment_t        vip;         /* srv6-insert only */
    sid_t            server9;
    sid_t            server8;
    sid_t            server7;
    sid_t            server6;
    sid_t            server5;
    sid_t            server4;
    sid_t            server3;
    sid_t            server2;
    sid_t            server1;
    sid_t            server0;
    segment_t        balancer;    /* srv6-insert only */
    ipv4_t           ipv4;
    ipv4_options_t   ipv4_options;
    ipv6_t           ipv6;
    tcp_t            tcp;
    tcp_option_t[40] tcp_options;
    udp_t            udp;
    quic_t           quic;
}

/* What happens to a packet. A packet is forwarded to a server, with the reasons of enum lb_reason in
 * bpf/balancer/stats.h, or passes to the host behind the switch, where the XDP balancer runs. */
enum bit<8> reason_t {
    NONE = 0, /* still on its way */
    FORWARD_KNOWN = 1,
    FORWARD_NEW = 2,
    FORWARD_HUNT = 3,
    FORWARD_RECOVER = 4,
    PASS_FROM_HOST = 5,    /* the host has sent it */
    PASS_NOT_FOR_HOST = 6, /* another MAC address, multicast, broadcast */
    PASS_NOT_IP = 7,
    PASS_NO_SERVICE = 8,   /* to no address and port that the switch balances */
    PASS_PROTOCOL = 9,     /* neither TCP nor QUIC directly behind the IP header */
    PASS_FRAGMENT = 10,
    PASS_MALFORMED = 11,   /* a header contradicts another one, or the length of the frame */
    PASS_FLAGS = 12,       /* SYN with FIN or RST */
    PASS_NO_SERVER = 13,   /* the row has no server for it, or its server has no next hop */
    PASS_HOP_LIMIT = 14,   /* the hop limit is exceeded */
    PASS_TOO_BIG = 15,     /* longer than the path to its server permits */
    DROP_PORT = 16,        /* from a port that is not in use */
    PASS_NO_SERVER_ID = 17, /* a packet of QUIC that names no server */
    PASS_NO_COOKIE = 18     /* for a host that has hints for flows without cookies */
}

/* How a packet travels to its servers. */
enum bit<1> encapsulation_t {
    SRV6_INSERT = 0,
    SRV6_ENCAP = 1
}

/* Functions of SIDs: enum sid_function in bpf/net/srv6.h. */
const bit<16> SID_CONNECT_AVAIL = 1;
const bit<16> SID_CONNECT_FORCE = 2;
const bit<16> SID_DELIVER = 5;
const bit<16> SID_STEER = 6;

/* What a service's entry says. */
struct service_t {
    bit<16>         number;
    bit<1>          tables;       /* which of the service's two tables are in force */
    bit<32>         bucket_mask;  /* the bits of the hash that are the bucket */
    bit<4>          candidates;
    bit<2>          cookie_width; /* in bits */
    bit<1>          hunts;        /* candidates decide; otherwise the first one gets the flow */
    bit<1>          has_hints;    /* the host has hints for flows without cookies */
    encapsulation_t encapsulation;
}

/* The servers that a packet visits, in the order of travel: struct segments in
 * bpf/balancer/segments.h. */
struct servers_t {
    bit<4>  count;
    /* The four highest bits of the argument of each server's SID, those of server 0 in the lowest
     * bits. */
    bit<32> columns;
    bit<16> slot0;
    bit<16> slot1;
    bit<16> slot2;
    bit<16> slot3;
    bit<16> slot4;
    bit<16> slot5;
    bit<16> slot6;
    bit<16> slot7;
    bit<16> slot8;
    bit<16> slot9;
}

struct packet_t {
    /* From the device. */
    bit<9>    ingress_port;
    bit<32>   frame_length;
    /* From the parser. IPv4 addresses have their IPv4-mapped form (RFC 4291 section 2.5.5.2). */
    bit<128>  source;
    bit<128>  destination;
    bit<8>    protocol;
    bit<16>   source_port;
    bit<16>   destination_port;
    bit<8>    traffic_class;
    bit<8>    hop_limit;
    bit<17>   length;        /* of layer 3 */
    bit<16>   header_length; /* of the IP header */
    reason_t  unusual;       /* why no service gets the packet; NONE: one can get it */
    bit<8>    options_left;  /* bytes of TCP options that are not parsed yet */
    bool      has_timestamps;
    bit<32>   echo;
    /* From the steps. */
    service_t service;
    bit<32>   hash;
    bit<32>   bucket;
    bit<4>    column;
    bit<5>    server_id_length; /* in octets */
    bit<128>  server_id; /* with the first octet of the connection ID: struct quic_prefix */
    servers_t servers;
    bit<16>   function;      /* what each server is asked */
    bit<1>    returns;       /* whether a server without the flow returns the packet */
    bit<16>   added;         /* bytes of the encapsulation */
    bit<9>    next_hop_port; /* towards the first server */
    bit<48>   next_hop_mac;
    bit<48>   own_mac;
    bit<16>   mtu;
    bit<128>  own_address;   /* of the balancer, as servers see it */
    reason_t  reason;
    bit<9>    egress_port;
}

/* No column: the packet has no cookie. */
const bit<4> NO_COLUMN = 8;
