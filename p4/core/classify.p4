/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Receive and classify: which packets are for this balancer, and for which of its services.
 */

/* Sorts packets by the port on which they arrive. Behind each port towards the network there is a
 * port to the host that controls the switch. The host has the MAC address of the network's port. */
control Receive(in headers_t headers, inout packet_t p) {
    action from_host(bit<9> network_port) {
        p.reason = reason_t.PASS_FROM_HOST;
        p.egress_port = network_port;
    }

    action from_network(bit<9> host_port, bit<48> mac) {
        p.egress_port = host_port;
        if (headers.ethernet.destination != mac || headers.ethernet.source[40:40] == 1) {
            p.reason = reason_t.PASS_NOT_FOR_HOST;
        } else if (p.unusual == reason_t.PASS_NOT_IP) {
            p.reason = reason_t.PASS_NOT_IP;
        }
    }

    action drop() {
        p.reason = reason_t.DROP_PORT;
    }

    table ports {
        key = { p.ingress_port: exact @name("port"); }
        actions = { from_host; from_network; @defaultonly drop; }
        default_action = drop();
        size = 64;
    }

    apply {
        ports.apply();
    }
}

/* Finds the service of a packet: by its port, or else the service for all ports of the VIP. */
control Classify(inout packet_t p, in tcp_t tcp) {
    action set_service(bit<16> number, bit<1> tables, bit<32> bucket_mask, bit<4> candidates,
                       bit<2> cookie_width, bit<1> hunts, bit<1> has_hints,
                       encapsulation_t encapsulation) {
        p.service.number = number;
        p.service.tables = tables;
        p.service.bucket_mask = bucket_mask;
        p.service.candidates = candidates;
        p.service.cookie_width = cookie_width;
        p.service.hunts = hunts;
        p.service.has_hints = has_hints;
        p.service.encapsulation = encapsulation;
    }

    table services {
        key = {
            p.destination: exact @name("vip");
            p.protocol: exact @name("protocol");
            p.destination_port: exact @name("port");
        }
        actions = { set_service; @defaultonly NoAction; }
        default_action = NoAction();
        size = SERVICES;
    }

    table services_of_all_ports {
        key = {
            p.destination: exact @name("vip");
            p.protocol: exact @name("protocol");
        }
        actions = { set_service; @defaultonly NoAction; }
        default_action = NoAction();
        size = SERVICES;
    }

    apply {
        if (p.unusual != reason_t.NONE) {
            p.reason = p.unusual;
        } else if (p.protocol == PROTOCOL_TCP && tcp.flags & TCP_SYN != 0 &&
                   tcp.flags & (TCP_FIN | TCP_RST) != 0) {
            p.reason = reason_t.PASS_FLAGS;
        } else if (!services.apply().hit) {
            if (!services_of_all_ports.apply().hit) {
                p.reason = reason_t.PASS_NO_SERVICE;
            }
        }
    }
}
