/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lookup and choose: the servers that a packet visits. Nothing is kept about flows. A SYN is offered
 * to the candidates of its bucket's row. Any other packet names a column of the row by its cookie,
 * and visits the servers that the column has or had (SHELL, sections II and III).
 *
 * Each service has two sets of these tables, so that all rows of a service change at once: the
 * controller writes the entries of the other set, and then the service's entry.
 */

/* Reads the cookie: the column in the low bits of the timestamp that the client echoes. An echo
 * counts only with the ACK flag (RFC 7323 section 3.2), and 0 is no echo, as Linux understands it.
 * See cookie_of in bpf/balancer/persist/cookie.h. */
control ReadCookie(inout packet_t p, in tcp_t tcp) {
    apply {
        bit<4> mask = ((bit<4>)1 << p.service.cookie_width) - 1;

        p.column = NO_COLUMN;
        if (p.service.candidates <= 1) {
            p.column = 0;
        } else if (p.has_timestamps && p.echo != 0 && tcp.flags & TCP_ACK != 0) {
            p.column = p.echo[3:0] & mask;
            if (p.column >= p.service.candidates) {
                p.column = NO_COLUMN;
            }
        }
    }
}

/* Finds the candidates of a new flow. A client without timestamps will send no cookie. A host with
 * hints offers such a flow itself, and its hint then names the server. Without hints, only the first
 * candidate may take the flow. */
control Choose(inout packet_t p) {
    action offer(bit<4> count, bit<32> columns, bit<16> slot0, bit<16> slot1, bit<16> slot2,
                 bit<16> slot3, bit<16> slot4, bit<16> slot5, bit<16> slot6, bit<16> slot7) {
        p.servers.count = count;
        p.servers.columns = columns;
        p.servers.slot0 = slot0;
        p.servers.slot1 = slot1;
        p.servers.slot2 = slot2;
        p.servers.slot3 = slot3;
        p.servers.slot4 = slot4;
        p.servers.slot5 = slot5;
        p.servers.slot6 = slot6;
        p.servers.slot7 = slot7;
    }

    table rows {
        key = {
            p.service.number: exact @name("service");
            p.service.tables: exact @name("tables");
            p.bucket: exact @name("bucket");
        }
        actions = { offer; @defaultonly NoAction; }
        default_action = NoAction();
        size = BUCKETS;
    }

    apply {
        bool will_have_cookie = p.has_timestamps || p.service.candidates <= 1;

        p.reason = reason_t.FORWARD_NEW;
        p.function = SID_CONNECT_FORCE;
        p.returns = 0;
        if (!will_have_cookie && p.service.has_hints == 1) {
            p.reason = reason_t.PASS_NO_COOKIE;
        } else if (!rows.apply().hit) {
            p.reason = reason_t.PASS_NO_SERVER;
        } else {
            if (p.service.hunts == 1) {
                p.reason = reason_t.FORWARD_HUNT;
            }
            if (p.service.hunts == 0 || !will_have_cookie) {
                p.servers.count = 1;
            }
            if (p.servers.count > 1) {
                p.function = SID_CONNECT_AVAIL;
            }
        }
    }
}

/* Finds the servers that may have the flow of a packet. A host with hints handles packets without a
 * cookie, and packets that the only server of a list has returned. */
control Lookup(inout packet_t p) {
    action go_to(bit<16> slot) {
        p.servers.count = 1;
        p.servers.slot0 = slot;
    }

    action visit(bit<4> count, bit<16> slot0, bit<16> slot1, bit<16> slot2, bit<16> slot3,
                 bit<16> slot4, bit<16> slot5, bit<16> slot6, bit<16> slot7, bit<16> slot8,
                 bit<16> slot9) {
        p.servers.count = count;
        p.servers.slot0 = slot0;
        p.servers.slot1 = slot1;
        p.servers.slot2 = slot2;
        p.servers.slot3 = slot3;
        p.servers.slot4 = slot4;
        p.servers.slot5 = slot5;
        p.servers.slot6 = slot6;
        p.servers.slot7 = slot7;
        p.servers.slot8 = slot8;
        p.servers.slot9 = slot9;
    }

    /* Columns that have had one server only. */
    table columns {
        key = {
            p.service.number: exact @name("service");
            p.service.tables: exact @name("tables");
            p.bucket: exact @name("bucket");
            p.column: exact @name("column");
        }
        actions = { go_to; @defaultonly NoAction; }
        default_action = NoAction();
        size = COLUMNS;
    }

    /* The servers of all other columns, the newest first, and of NO_COLUMN. */
    table histories {
        key = {
            p.service.number: exact @name("service");
            p.service.tables: exact @name("tables");
            p.bucket: exact @name("bucket");
            p.column: exact @name("column");
        }
        actions = { visit; @defaultonly NoAction; }
        default_action = NoAction();
        size = HISTORIES;
    }

    apply {
        p.function = SID_STEER;
        p.servers.columns = 0;
        p.returns = p.service.has_hints;
        p.reason = reason_t.FORWARD_KNOWN;
        if (p.column == NO_COLUMN && p.service.has_hints == 1) {
            p.reason = reason_t.PASS_NO_COOKIE;
        } else if (!columns.apply().hit) {
            if (!histories.apply().hit) {
                p.reason = reason_t.PASS_NO_SERVER;
            } else if (p.servers.count > 1) {
                p.reason = reason_t.FORWARD_RECOVER;
                p.returns = 0;
            }
        }
    }
}

/* Finds the server that a packet of QUIC names by its connection ID (docs/operate/quic.md). The host
 * handles packets that name none: it places new connections. See bpf/balancer/persist/quic.h. */
control LookupServerID(in headers_t headers, inout packet_t p) {
    bit<16> id_length = 0;

    /* The mask covers what all IDs of a server have in common. Lengths are in octets. */
    action set_form(bit<128> mask, bit<5> server_id_length, bit<16> length) {
        p.server_id = (headers.quic.rotation ++ headers.quic.id) & mask;
        p.server_id_length = server_id_length;
        id_length = length;
    }

    action go_to(bit<16> slot) {
        p.servers.count = 1;
        p.servers.slot0 = slot;
    }

    /* The forms of a service's connection IDs: the present one and, during a change, the former. */
    table quic_forms {
        key = {
            p.service.number: exact @name("service");
            headers.quic.rotation: exact @name("rotation");
        }
        actions = { set_form; @defaultonly NoAction; }
        default_action = NoAction();
        size = 2 * SERVICES;
    }

    table quic_servers {
        key = {
            p.service.number: exact @name("service");
            p.server_id_length: exact @name("length");
            p.server_id: exact @name("octets");
        }
        actions = { go_to; @defaultonly NoAction; }
        default_action = NoAction();
        size = 2 * SERVERS;
    }

    apply {
        p.reason = reason_t.PASS_NO_SERVER_ID;
        p.function = SID_DELIVER;
        p.returns = 0;
        p.servers.columns = 0;
        if (headers.quic.has_long_header == 0 && quic_forms.apply().hit) {
            /* Behind the header of UDP and the first octet of QUIC. */
            if (headers.udp.length >= 9 + id_length && quic_servers.apply().hit) {
                p.reason = reason_t.FORWARD_KNOWN;
            }
        }
    }
}
