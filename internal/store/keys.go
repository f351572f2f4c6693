// SPDX-License-Identifier: Apache-2.0

package store

import (
	"fmt"
	"net/url"
	"strings"
)

// The keys below the prefix of a fleet. Names of services and servers are escaped as in the path of
// a URL (RFC 3986, section 2.1). So a key never has a line break, which etcd's tools would print.
const (
	headKey    = "head"    // the last change (head)
	releaseKey = "release" // the change that balancers follow (release)
	writerKey  = "writer"  // exists while a change of many keys is being written
	leaderKey  = "leader"  // the balancer that makes generations
	presentKey = "l2/"     // BALANCER: exists while the balancer is present (presence.go)

	servicesKey    = "services/"    // SERVICE: the fields of a service, without its servers
	serversKey     = "servers/"     // SERVICE/SERVER: the fields of a server
	overridesKey   = "overrides/"   // SERVICE, or SERVICE/SERVER: the override of a service or server
	generationsKey = "generations/" // SERVICE: the numbers and sets of servers of a service
	setsKey        = "sets/"        // ID/PIECE: a part of a set of servers
)

// keyOf returns a key for a service, or for a server of a service. kind is the beginning of the
// key, such as servicesKey.
func keyOf(kind, service string, server ...string) string {
	key := kind + url.PathEscape(service)
	for _, name := range server {
		key += "/" + url.PathEscape(name)
	}
	return key
}

// namesOf returns the names with which keyOf has made a key. For the key of a service, the name of
// the server is empty.
func namesOf(kind, key string) (service, server string, err error) {
	escapedService, escapedServer, isServer := strings.Cut(strings.TrimPrefix(key, kind), "/")
	service, err = url.PathUnescape(escapedService)
	if err == nil && isServer {
		server, err = url.PathUnescape(escapedServer)
	}
	mustBeServer := kind == serversKey
	mayBeServer := mustBeServer || kind == overridesKey // an override may be of either
	switch {
	case err != nil:
		return "", "", fmt.Errorf("key %s: %w", key, err)
	case service == "" || isServer && server == "":
		return "", "", fmt.Errorf("key %s: has an empty name", key)
	case mustBeServer && !isServer, isServer && !mayBeServer:
		return "", "", fmt.Errorf("key %s: names a server where a service belongs, or the reverse", key)
	}
	return service, server, nil
}

// kindOf returns the kind of a key whose value is an item: servicesKey, serversKey, overridesKey or
// generationsKey. For other keys it returns an empty string.
func kindOf(key string) string {
	for _, kind := range []string{servicesKey, serversKey, overridesKey, generationsKey} {
		if strings.HasPrefix(key, kind) {
			return kind
		}
	}
	return ""
}
