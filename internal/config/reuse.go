// SPDX-License-Identifier: Apache-2.0

package config

import (
	"reflect"
	"strings"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// decoded is what the services of a document have become. An override changes few of them, and merge
// leaves the nodes of all others as they are. So the services and servers with these nodes need not be
// decoded again, which would take most of the time of a change.
type decoded struct {
	services map[string]decodedService // by name
}

type decodedService struct {
	node    *yaml.Node
	service *desired.Service
}

// decodedOf returns the services of a document from which a balancer was made without an error.
func decodedOf(root *yaml.Node, b *desired.Balancer) *decoded {
	d := &decoded{map[string]decodedService{}}
	for i, node := range servicesOf(root) {
		d.services[b.Services[i].Name] = decodedService{node, &b.Services[i]}
	}
	return d
}

// reuse sets a service, or a server, that was decoded before. It tells whether there is one. Such a
// value has all defaults, and shares memory with the earlier one.
func (d *document) reuse(path string, node *yaml.Node, into reflect.Value) bool {
	switch into := into.Addr().Interface().(type) {
	case *desired.Service:
		d.servers = nil
		before, ok := d.before.services[nameOf(node)]
		if ok && before.node != node {
			d.servers = before.serversFor(resolved(node))
		}
		if !ok || before.node != node {
			return false
		}
		*into = *before.service
	case *desired.Server:
		before, ok := d.servers[node]
		if !ok {
			return false
		}
		*into = *before
	default:
		return false
	}
	d.reused[path] = true
	d.fields[path] = place{line: node.Line}
	return true
}

// serversFor returns the servers, by their nodes, if the service differs from another one in nothing but
// its servers: defaults of a server can depend on its service.
func (s *decodedService) serversFor(now *yaml.Node) map[*yaml.Node]*desired.Server {
	before := resolved(s.node)
	if len(before.Content) != len(now.Content) {
		return nil
	}
	for i := 0; i < len(now.Content); i += 2 {
		isSame := now.Content[i] == before.Content[i] && now.Content[i+1] == before.Content[i+1]
		if !isSame && (now.Content[i].Value != "servers" || before.Content[i].Value != "servers") {
			return nil
		}
	}
	servers := map[*yaml.Node]*desired.Server{}
	for i, node := range elements(child(before, "servers")) {
		servers[node] = &s.service.Servers[i]
	}
	return servers
}

// given tells whether a field needs no default: the document has a value, or its service or server was
// complete before.
func (d *document) given(path string) bool {
	if d.has(path) {
		return true
	}
	server := strings.LastIndexByte(path, ']')
	return server >= 0 && d.reused[path[:server+1]]
}

// isNew tells whether a service was decoded anew.
func (d *document) isNew(service int) bool { return !d.reused[fieldpath.Item("services", service)] }

// completeServices sets the defaults of the services that were decoded anew.
func (d *document) completeServices(b *desired.Balancer) {
	for i := range b.Services {
		if d.isNew(i) {
			b.Services[i].Revision = new(desired.Revision)
			b.SetServiceDefaults(i, d.given)
		}
	}
}
