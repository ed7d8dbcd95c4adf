// A program that knows nothing but OpenCL, and runs what `dispatcher export --to opencl` wrote:
//   opencl_host LIBRARY PLATFORM FILE.json FOLDER
// LIBRARY is OpenCL's, PLATFORM the name of a platform; FOLDER has the inputs as NAME.raw, and gets output.raw.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

struct Json {
    std::string text;  // of a text or a number
    std::vector<Json> list;
    std::map<std::string, Json> fields;
    bool has(const char *name) const { return fields.count(name); }
    const Json &operator[](const char *name) const { return fields.at(name); }
    double number() const { return strtod(text.c_str(), nullptr); }
};

static Json parsed(const char *&at) {
    auto skip = [&] { at += strspn(at, " \n,:"); };
    Json json;
    skip();
    if (*at == '"') {
        const char *end = strchr(at + 1, '"');  // no text here holds a quote
        json.text.assign(at + 1, end);
        at = end + 1;
    } else if (*at == '{' || *at == '[') {
        const char close = *at++ == '{' ? '}' : ']';
        for (skip(); *at != close; skip()) {
            Json first = parsed(at);
            if (close == '}')
                json.fields[first.text] = parsed(at);
            else
                json.list.push_back(first);
        }
        at++;
    } else {
        json.text.assign(at, strcspn(at, " \n,:]}"));
        at += json.text.size();
    }
    return json;
}

static std::string content(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) fprintf(stderr, "cannot read %s\n", path.c_str()), exit(1);
    return {std::istreambuf_iterator<char>(file), {}};
}

static void *library;
template <class Result, class... Given> Result call(const char *name, Given... given) {
    return reinterpret_cast<Result (*)(Given...)>(dlsym(library, name))(given...);
}
static void check(int error, const char *what) {
    if (error) fprintf(stderr, "%s: error %d\n", what, error), exit(1);
}

template <class Real>
static std::string filled(const Json &buffer, const std::string &data, const std::string &folder) {
    std::string bytes(size_t(buffer["bytes"].number()), '\0');
    Real *to = reinterpret_cast<Real *>(bytes.data());
    auto tensor = [&](const Json &name) { return content(folder + "/" + name.text + ".raw"); };
    auto constant = [&](const Json &place) { return data.data() + size_t(place["offset"].number()); };
    if (buffer.has("tensor")) bytes = tensor(buffer["tensor"]);
    if (buffer.has("data")) memcpy(bytes.data(), constant(buffer["data"]), size_t(buffer["data"]["bytes"].number()));
    if (buffer.has("packed")) {
        const std::string from = tensor(buffer["packed"]["tensor"]);
        const Json &place = buffer["packed"]["order"];
        const int32_t *order = reinterpret_cast<const int32_t *>(constant(place));
        for (size_t i = 0; i < place["bytes"].number() / 4; i++)
            to[i] = order[i] < 0 ? 0 : reinterpret_cast<const Real *>(from.data())[order[i]];
    }
    if (buffer.has("operands"))
        for (const Json &each : buffer["operands"].list) {
            Real *at = to + size_t(each["at"].number());
            if (each.has("value"))
                *at = Real(each["value"].number());
            else
                memcpy(at, tensor(each["tensor"]).data(), sizeof(Real) * size_t(each["elements"].number()));
        }
    return bytes;
}

int main(int, char **arguments) {
    library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fprintf(stderr, "%s\n", dlerror()), exit(1);
    const std::string path = arguments[3], folder = arguments[4], text = content(path);
    const std::string beside = path.substr(0, path.rfind('/') + 1);
    const char *at = text.c_str();
    const Json json = parsed(at);
    const std::string data = content(beside + json["data"].text);

    void *platforms[16], *platform = nullptr, *device = nullptr;
    uint32_t count = 0;
    check(call<int>("clGetPlatformIDs", uint32_t(16), platforms, &count), "platforms");
    for (uint32_t i = 0; i < count; i++) {
        char name[256] = "";
        check(call<int>("clGetPlatformInfo", platforms[i], uint32_t(0x0902), sizeof name, name, (size_t *)nullptr), "name");
        if (!strcmp(name, arguments[2])) platform = platforms[i];
    }
    check(call<int>("clGetDeviceIDs", platform, uint64_t(0xFFFFFFFF), uint32_t(1), &device, (uint32_t *)nullptr), "device");
    int error = 0;
    void *none = nullptr;
    void *context = call<void *>("clCreateContext", none, uint32_t(1), &device, none, none, &error);
    check(error, "context");
    void *queue = call<void *>("clCreateCommandQueue", context, device, uint64_t(0), &error);
    check(error, "queue");

    std::map<std::string, void *> buffers;
    for (const Json &each : json["buffers"].list) {
        std::string bytes = json["dtype"].text == "float64" ? filled<double>(each, data, folder) : filled<float>(each, data, folder);
        void *&buffer = buffers[each["name"].text];
        buffer = call<void *>("clCreateBuffer", context, uint64_t(1 | 32), bytes.size(), (void *)bytes.data(), &error);
        check(error, each["name"].text.c_str());
    }
    for (const Json &launch : json["launches"].list) {
        const std::string source = content(beside + json["sources"].list[size_t(launch["source"].number())].text);
        const char *start = source.c_str();
        const size_t length = source.size();
        void *program = call<void *>("clCreateProgramWithSource", context, uint32_t(1), &start, &length, &error);
        check(call<int>("clBuildProgram", program, uint32_t(1), &device, json["build_options"].text.c_str(), none, none), "build");
        void *kernel = call<void *>("clCreateKernel", program, launch["kernel"].text.c_str(), &error);
        check(error, "kernel");
        uint32_t place = 0;
        for (const Json &argument : launch["arguments"].list) {
            const auto &[kind, value] = *argument.fields.begin();
            const int64_t number = kind == "buffer" ? 0 : int64_t(value.number());
            const void *given = kind == "buffer" ? (const void *)&buffers.at(value.text) : (const void *)&number;
            const size_t size = kind == "buffer" ? sizeof(void *) : kind == "int32" || kind == "uint32" ? 4 : 8;
            check(call<int>("clSetKernelArg", kernel, place++, size, given), "argument");
        }
        const size_t items = size_t(launch["global"].number()), local = size_t(launch["local"].number());
        check(call<int>("clEnqueueNDRangeKernel", queue, kernel, uint32_t(1), none, &items, &local, uint32_t(0), none, none), "launch");
    }
    size_t elements = json["dtype"].text == "float64" ? 8 : 4;
    for (const Json &extent : json["output"]["shape"].list) elements *= size_t(extent.number());
    std::string result(elements, '\0');
    void *output = buffers.at(json["output"]["buffer"].text);
    check(call<int>("clEnqueueReadBuffer", queue, output, uint32_t(1), size_t(0), result.size(), (void *)result.data(), uint32_t(0), none, none), "result");
    std::ofstream(folder + "/output.raw", std::ios::binary) << result;
    return 0;
}
